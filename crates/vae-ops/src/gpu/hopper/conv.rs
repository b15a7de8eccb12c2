//! Channels-last convolutions (3x3, 1x1, and 3x3 of a doubled image) with a fused epilogue.
//!
//! A cube computes tiles of 256 pixels by 128 output channels, or 192 by 192 where that wastes less. Two or three
//! warpgroups multiply (64 channels each, weights as the rows of wgmma and pixels as its columns), one thread loads and a warp
//! for each warpgroup stores: loops that meet only at mbarriers. The pixels of a tile are loaded once for each horizontal
//! tap; the vertical taps read the same shared memory, some rows further down. A storing warp also takes the moments of what
//! it stores, under the products of the next tile.

use cubecl::{prelude::*, server::Handle};
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::{ptx::*, tensor_map};
use crate::gpu::{
    group_norm::{MOMENTS, Moments},
    launch::buffer,
};

/// Channels of a warpgroup: the rows of wgmma.
const GROUP_CHANNELS: u32 = 64;
/// Channels of a storing lane: 16 bytes.
const LANE_CHANNELS: usize = 8;
/// Units of a warpgroup and of a warp.
const GROUP: u32 = 128;
const WARP: u32 = 32;
/// Shared memory of a cube on sm_90.
pub(super) const SHARED_MEMORY: u32 = 232_448;
/// Left for barriers.
const BARRIERS: u32 = 256;

/// The form of a kernel: everything that is compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub half: Half,
    /// Taps on each axis: 1, 3, or 2 for the doubled image.
    pub taps: u32,
    /// Warpgroups that multiply: 2 with tiles of 256 pixels, 3 with tiles of 192.
    pub groups: u32,
    /// Products of the last channels of the input, where they are no full row of shared memory; else 0.
    pub tail_steps: u32,
    /// Height and width of a tile in pixels; the width is a multiple of 8 so that a row of taps keeps the swizzle's phase.
    pub tile_height: u32,
    pub tile_width: u32,
    pub residual: bool,
    pub moments: bool,
}

impl Form {
    /// 2 for the doubled image, which has four phases of output pixels.
    pub fn phases(&self) -> u32 {
        if self.taps == 2 { 2 } else { 1 }
    }
    fn tile_pixels(&self) -> u32 {
        self.tile_height * self.tile_width
    }
    fn tile_channels(&self) -> u32 {
        self.groups * GROUP_CHANNELS
    }
    /// Sums in a multiplying unit's registers.
    fn sums(&self) -> u32 {
        GROUP_CHANNELS * self.tile_pixels() / GROUP
    }
    /// Length of the vector of sums: C++ aligns it to a power of two.
    fn sum_vector(&self) -> usize {
        self.sums().next_power_of_two() as usize
    }
    /// The multiplying warpgroups, then a warp of which one unit loads, then a storing warp for each group.
    fn units(&self) -> u32 {
        self.storer() + self.groups * WARP
    }
    fn loader(&self) -> u32 {
        self.groups * GROUP
    }
    fn storer(&self) -> u32 {
        self.loader() + WARP
    }
    fn halo_height(&self) -> u32 {
        self.tile_height + self.taps - 1
    }
    pub fn pixel_bytes(&self) -> u32 {
        self.halo_height() * self.tile_width * ROW_BYTES
    }
    /// Bytes of a slot of weights: all channels by a row of k.
    fn weight_bytes(&self) -> u32 {
        self.tile_channels() * ROW_BYTES
    }
    /// Bytes of a warpgroup's part of the result.
    fn result_bytes(&self) -> u32 {
        self.tile_pixels() * ROW_BYTES
    }
    /// Slots of the two rings: as many as fit, weights before pixels where there are several taps to one slot of pixels.
    fn pixel_slots(&self) -> u32 {
        if self.taps == 1 { 3 } else { 2 }
    }
    fn weight_slots(&self) -> u32 {
        let results = self.groups * self.result_bytes();
        let left = SHARED_MEMORY - BARRIERS - results - self.pixel_slots() * self.pixel_bytes();
        (left / self.weight_bytes()).min(6)
    }
    fn weights_at(&self) -> u32 {
        self.pixel_slots() * self.pixel_bytes()
    }
    fn results_at(&self) -> u32 {
        self.weights_at() + self.weight_slots() * self.weight_bytes()
    }
    fn barriers_at(&self) -> u32 {
        self.results_at() + self.groups * self.result_bytes()
    }
    fn shared_bytes(&self) -> u32 {
        self.barriers_at() + BARRIERS
    }
    /// Barriers, in order: full and empty of the pixels, of the weights, then ready and done of the groups' results.
    fn pixels_full(&self) -> u32 {
        self.barriers_at()
    }
    fn pixels_empty(&self) -> u32 {
        self.pixels_full() + self.pixel_slots() * BARRIER_BYTES
    }
    fn weights_full(&self) -> u32 {
        self.pixels_empty() + self.pixel_slots() * BARRIER_BYTES
    }
    fn weights_empty(&self) -> u32 {
        self.weights_full() + self.weight_slots() * BARRIER_BYTES
    }
    fn result_ready(&self) -> u32 {
        self.weights_empty() + self.weight_slots() * BARRIER_BYTES
    }
    fn result_done(&self) -> u32 {
        self.result_ready() + self.groups * BARRIER_BYTES
    }

    /// The sum over k of one tile, in PTX: the whole loop, because accumulators that cross between blocks of inline
    /// assembly would be copied and wgmma serialised.
    ///
    /// Inputs: `$1` weight descriptor, `$2` pixel descriptor, `$3` address of the barriers, `$4` whether this unit signals,
    /// `$5` and `$6` slot and phase of the weights' ring, `$7` and `$8` of the pixels' ring, `$9` rows of channels taken whole.
    pub fn main_loop(&self) -> String {
        let mut ptx = String::from(
            "{\n.reg .pred done, adds, signals, wraps;\n.reg .b32 bar, started, tap, count, wslot, wphase, pslot, pphase;\n\
             .reg .b64 off, wdesc, pdesc, w<4>, p<4>;\n\
             mov.u32 wslot, $5;\nmov.u32 wphase, $6;\nmov.u32 pslot, $7;\nmov.u32 pphase, $8;\nmov.u32 started, 0;\n\
             mov.u32 tap, 0;\nsetp.ne.u32 signals, $4, 0;\nTAP:\nmov.u32 count, 0;\n\
             FULL:\nsetp.ge.u32 done, count, $9;\n@done bra LAST;\n",
        );
        ptx += &self.products("FULL", ROW_CHANNELS / MMA_DEPTH);
        ptx += "add.u32 count, count, 1;\nbra FULL;\nLAST:\n";
        if self.tail_steps > 0 {
            ptx += &self.products("LAST", self.tail_steps);
        }
        ptx += &format!(
            "add.u32 tap, tap, 1;\nsetp.lt.u32 wraps, tap, {};\n@wraps bra TAP;\n}}",
            self.taps
        );
        ptx
    }

    /// The products of one slot of pixels with the weights of its vertical taps, `steps` of them deep.
    fn products(&self, label: &str, steps: u32) -> String {
        let sums = (0..self.sums()).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
        let (half, pixels) = (self.half.name(), self.tile_pixels());
        let offset = |barrier: u32| barrier - self.barriers_at();
        let wait = |label: &str, slot: &str, phase: &str, full: u32| {
            format!(
                "shl.b32 bar, {slot}, 3;\nadd.u32 bar, bar, $3;\n{label}:\n\
                 mbarrier.try_wait.parity.shared::cta.b64 done, [bar+{full}], {phase};\n@!done bra {label};\n",
                full = offset(full)
            )
        };
        let release = |slot: &str, empty: u32| {
            format!(
                "shl.b32 bar, {slot}, 3;\nadd.u32 bar, bar, $3;\n@signals mbarrier.arrive.shared::cta.b64 _, [bar+{}];\n",
                offset(empty)
            )
        };
        let advance = |slot: &str, phase: &str, slots: u32| {
            format!(
                "add.u32 {slot}, {slot}, 1;\nsetp.eq.u32 wraps, {slot}, {slots};\n@wraps mov.u32 {slot}, 0;\n\
                 @wraps xor.b32 {phase}, {phase}, 1;\n"
            )
        };
        let mut ptx = wait(&format!("{label}_PIXELS"), "pslot", "pphase", self.pixels_full());
        ptx += &format!(
            "mul.wide.u32 off, pslot, {};\nadd.u64 pdesc, $2, off;\n",
            self.pixel_bytes() / 16
        );
        for tap in 0..self.taps {
            ptx += &wait(&format!("{label}_WEIGHTS{tap}"), "wslot", "wphase", self.weights_full());
            ptx += &format!(
                "mul.wide.u32 off, wslot, {};\nadd.u64 wdesc, $1, off;\n",
                self.weight_bytes() / 16
            );
            for step in 0..steps {
                let along_k = step * MMA_DEPTH * 2 / 16;
                let rows_down = tap * self.tile_width * ROW_BYTES / 16;
                ptx += &format!(
                    "add.u64 w{step}, wdesc, {along_k};\nadd.u64 p{step}, pdesc, {};\n",
                    rows_down + along_k
                );
            }
            if tap == 0 {
                // The first product of a tile overwrites what the registers hold.
                ptx += "setp.ne.u32 adds, started, 0;\nmov.u32 started, 1;\n";
            }
            ptx += "wgmma.fence.sync.aligned;\n";
            for step in 0..steps {
                let adds = if tap == 0 && step == 0 { "adds" } else { "1" };
                ptx += &format!(
                    "wgmma.mma_async.sync.aligned.m64n{pixels}k16.f32.{half}.{half} {{{sums}}}, w{step}, p{step}, {adds}, 1, 1, 0, 0;\n"
                );
            }
            // Waiting for all is enough: another warpgroup keeps the tensor cores busy.
            ptx += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";
            ptx += &release("wslot", self.weights_empty());
            ptx += &advance("wslot", "wphase", self.weight_slots());
        }
        ptx += &release("pslot", self.pixels_empty());
        ptx += &advance("pslot", "pphase", self.pixel_slots());
        ptx
    }
}

#[cube]
fn main_loop<N: Size>(
    weights: u64,
    pixels: u64,
    barriers: u32,
    signals: u32,
    weight_slot: u32,
    weight_phase: u32,
    pixel_slot: u32,
    pixel_phase: u32,
    count: u32,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let body = comptime!(form.main_loop());
    let sums: Vector<f32, N>;
    // The comment names every operand, because each must occur.
    gpu_asm!(
        "{body} /* {d} {w} {p} {b} {s} {ws} {wp} {ps} {pp} {n} */",
        d = out(_) sums, w = in(_) u64::cast_from(weights), p = in(_) u64::cast_from(pixels), b = in(_) u32::cast_from(barriers),
        s = in(_) u32::cast_from(signals), ws = in(_) u32::cast_from(weight_slot), wp = in(_) u32::cast_from(weight_phase),
        ps = in(_) u32::cast_from(pixel_slot), pp = in(_) u32::cast_from(pixel_phase), n = in(_) u32::cast_from(count),
    );
    sums
}

/// Sizes at run time.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
struct Problem {
    height: u32,
    width: u32,
    channels_in: u32,
    channels_out: u32,
    images: u32,
    tiles_y: u32,
    tiles_x: u32,
    /// Tiles of channels.
    channel_tiles: u32,
    /// Tiles of all images, phases and channels.
    tiles: u32,
}

/// The place of a tile.
#[derive(CubeType, Clone, Copy)]
struct Tile {
    image: u32,
    y: u32,
    x: u32,
    phase_y: u32,
    phase_x: u32,
    channel: u32,
}

/// Tiles in order: those that share pixels run together and meet in the cache.
#[cube]
fn tile(number: u32, problem: &Problem, #[comptime] form: Form) -> Tile {
    let phases = comptime!(form.phases());
    let channel = number % problem.channel_tiles * comptime!(form.tile_channels());
    let rest = number / problem.channel_tiles;
    let phase = rest % comptime!(phases * phases);
    let pixels = rest / comptime!(phases * phases);
    let per_image = problem.tiles_y * problem.tiles_x;
    let index = pixels % per_image;
    Tile {
        image: pixels / per_image,
        y: index / problem.tiles_x * comptime!(form.tile_height),
        x: index % problem.tiles_x * comptime!(form.tile_width),
        phase_y: phase / phases,
        phase_x: phase % phases,
        channel,
    }
}

/// Moments of a storing lane's channels: means and sums of squared deviations from them.
#[derive(CubeType)]
struct LaneMoments {
    count: f32,
    means: Array<f32>,
    m2s: Array<f32>,
}

/// Merges others' moments of a channel: `share` is what their count is of `count` and theirs.
#[cube]
fn merge(moments: &mut LaneMoments, #[comptime] channel: usize, share: f32, mean: f32, m2: f32) {
    let delta = mean - moments.means[channel];
    moments.means[channel] += delta * share;
    moments.m2s[channel] += m2 + delta * delta * moments.count * share;
}

#[cube(launch_unchecked)]
fn hopper_conv_kernel<E: Float, NS: Size, NM: Size>(
    x: &TensorMap<E, Tiled>,
    weights: &TensorMap<E, Tiled>,
    out: &TensorMap<E, Tiled>,
    residual: ComptimeOption<&TensorMap<E, Tiled>>,
    bias: &[f32],
    moments: &mut [f32],
    problem: Problem,
    #[comptime] form: Form,
    #[define(E)] _dtype: ElemType,
) {
    let shared = Shared::<[u64]>::new_aligned_slice(comptime!(form.shared_bytes() as usize / 8), 1024usize);
    let base = unsafe { generic_to_shared::<u64>(shared.as_slice().as_ptr_unchecked()) };
    let pixels_full = base + comptime!(form.pixels_full());
    let pixels_empty = base + comptime!(form.pixels_empty());
    let weights_full = base + comptime!(form.weights_full());
    let weights_empty = base + comptime!(form.weights_empty());
    let result_ready = base + comptime!(form.result_ready());
    let result_done = base + comptime!(form.result_done());
    let pixel_slots = comptime!(form.pixel_slots());
    let weight_slots = comptime!(form.weight_slots());

    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..pixel_slots {
            barrier_init(pixels_full + comptime!(i * BARRIER_BYTES), 1u32);
            barrier_init(pixels_empty + comptime!(i * BARRIER_BYTES), comptime!(form.groups));
        }
        #[unroll]
        for i in 0..weight_slots {
            barrier_init(weights_full + comptime!(i * BARRIER_BYTES), 1u32);
            barrier_init(weights_empty + comptime!(i * BARRIER_BYTES), comptime!(form.groups));
        }
        #[unroll]
        for i in 0..comptime!(form.groups) {
            barrier_init(result_ready + comptime!(i * BARRIER_BYTES), 1u32);
            barrier_init(result_done + comptime!(i * BARRIER_BYTES), GROUP);
        }
        barrier_init_fence();
    }
    sync_cube();

    if UNIT_POS < comptime!(form.loader()) {
        multiply::<NS, NM>(base, bias, &problem, form);
    } else if UNIT_POS == comptime!(form.loader()) {
        load::<E>(base, x, weights, &problem, form);
    } else if UNIT_POS >= comptime!(form.storer()) {
        let group = (UNIT_POS - comptime!(form.storer())) / WARP;
        store::<E, NM>(base, group, out, residual, moments, &problem, form);
    }
}

/// What the warpgroups do.
#[cube]
fn multiply<NS: Size, NM: Size>(base: u32, bias: &[f32], problem: &Problem, #[comptime] form: Form) {
    let half = comptime!(form.half);
    let group = UNIT_POS / GROUP;
    let unit = UNIT_POS % GROUP;
    let warp = unit / 32;
    let lane = unit % 32;
    let weight_descriptor = descriptor(base + comptime!(form.weights_at()) + group * (GROUP_CHANNELS * ROW_BYTES));
    let pixel_descriptor = descriptor(base);
    let barriers = base + comptime!(form.barriers_at());
    let signals = u32::cast_from(unit == 0);
    let result = base + comptime!(form.results_at()) + group * comptime!(form.result_bytes());
    let ready = base + comptime!(form.result_ready()) + group * BARRIER_BYTES;
    let done = base + comptime!(form.result_done()) + group * BARRIER_BYTES;
    // Where this lane's row of a matrix lies in 64 pixels by 64 channels of swizzled rows.
    let row = lane % 8;
    let lane_address = result + ((lane / 16) * 8 + row) * ROW_BYTES + ((warp * 2 + (lane / 8) % 2) ^ row) * 16;

    let rows = problem.channels_in.div_ceil(ROW_CHANNELS);
    let full_rows = if comptime!(form.tail_steps > 0) { rows - 1 } else { rows };
    let loads = comptime!(form.taps) * rows;
    let mut taken = 0u32;
    let mut phase = 0u32;
    let mut number = CUBE_POS_X;
    while number < problem.tiles {
        let tile = tile(number, problem, form);
        let weights_taken = taken * comptime!(form.taps);
        // Two rows of the accumulator: channels 8 apart.
        let channel = tile.channel + group * GROUP_CHANNELS + warp * 16 + lane / 4;
        // Loaded before the loop, whose length hides it.
        let mut bias_low = 0.0f32;
        let mut bias_high = 0.0f32;
        if channel < problem.channels_out {
            bias_low = bias[channel as usize];
        }
        if channel + 8 < problem.channels_out {
            bias_high = bias[(channel + 8) as usize];
        }
        let sums = main_loop::<NS>(
            weight_descriptor,
            pixel_descriptor,
            barriers,
            signals,
            weights_taken % comptime!(form.weight_slots()),
            weights_taken / comptime!(form.weight_slots()) % 2,
            taken % comptime!(form.pixel_slots()),
            taken / comptime!(form.pixel_slots()) % 2,
            full_rows,
            form,
        );
        taken += loads;

        // The last result has left the buffer, and the residual is in it.
        barrier_wait(ready, phase);
        phase = phase ^ 1;
        #[unroll]
        for step in 0..comptime!(form.tile_pixels() / 16) {
            // Four matrices: pixels in pairs of this lane, 8 further on; each for both rows.
            let address = lane_address + comptime!(step * 16 * ROW_BYTES);
            let first = comptime!((step * 8) as usize);
            let mut values = Array::<f32>::new(8usize);
            #[unroll]
            for i in 0..8usize {
                let bias = if comptime!(i % 4 < 2) { bias_low } else { bias_high };
                values[i] = sums.extract(comptime!(first + i)) + bias;
            }
            if comptime!(form.residual) {
                let residual = load_matrix_transposed::<NM>(address);
                #[unroll]
                for i in 0..4usize {
                    values[comptime!(2 * i)] += unpack_low(residual.extract(i), half);
                    values[comptime!(2 * i + 1)] += unpack_high(residual.extract(i), half);
                }
            }
            store_matrix_transposed(
                address,
                pack(values[0], values[1], half),
                pack(values[2], values[3], half),
                pack(values[4], values[5], half),
                pack(values[6], values[7], half),
            );
        }
        async_proxy_fence();
        barrier_arrive(done);
        number += CUBE_COUNT_X;
    }
}

/// What the loading unit does.
#[cube]
fn load<E: Float>(
    base: u32,
    x: &TensorMap<E, Tiled>,
    weights: &TensorMap<E, Tiled>,
    problem: &Problem,
    #[comptime] form: Form,
) {
    let channel_blocks = problem.channels_in.div_ceil(ROW_CHANNELS);
    let x_map = tensor_map_address(x);
    let weight_map = tensor_map_address(weights);
    let taps = comptime!(form.taps);
    let before = comptime!((form.taps / 2) as i32);
    let mut weight_slot = 0u32;
    let mut weight_phase = 1u32;
    let mut pixel_slot = 0u32;
    let mut pixel_phase = 1u32;
    let mut number = CUBE_POS_X;
    while number < problem.tiles {
        let tile = tile(number, problem, form);
        let y = i32::cast_from(tile.y + tile.phase_y) - before;
        let x = i32::cast_from(tile.x + tile.phase_x) - before;
        let phase = tile.phase_y * comptime!(form.phases()) + tile.phase_x;
        let weight_row = i32::cast_from(phase * problem.channels_out + tile.channel);
        for tap_x in 0..taps {
            for block in 0..channel_blocks {
                let full = base + comptime!(form.pixels_full()) + pixel_slot * BARRIER_BYTES;
                barrier_wait(
                    base + comptime!(form.pixels_empty()) + pixel_slot * BARRIER_BYTES,
                    pixel_phase,
                );
                barrier_expect(full, comptime!(form.pixel_bytes()));
                tma_load_image(
                    base + pixel_slot * comptime!(form.pixel_bytes()),
                    x_map,
                    i32::cast_from(block * ROW_CHANNELS),
                    x + i32::cast_from(tap_x),
                    y,
                    i32::cast_from(tile.image),
                    full,
                );
                pixel_slot += 1;
                if pixel_slot == comptime!(form.pixel_slots()) {
                    pixel_slot = 0u32;
                    pixel_phase = pixel_phase ^ 1;
                }
                for tap_y in 0..taps {
                    let full = base + comptime!(form.weights_full()) + weight_slot * BARRIER_BYTES;
                    barrier_wait(
                        base + comptime!(form.weights_empty()) + weight_slot * BARRIER_BYTES,
                        weight_phase,
                    );
                    barrier_expect(full, comptime!(form.weight_bytes()));
                    let k = (tap_y * taps + tap_x) * problem.channels_in + block * ROW_CHANNELS;
                    tma_load_2d(
                        base + comptime!(form.weights_at()) + weight_slot * comptime!(form.weight_bytes()),
                        weight_map,
                        i32::cast_from(k),
                        weight_row,
                        full,
                    );
                    weight_slot += 1;
                    if weight_slot == comptime!(form.weight_slots()) {
                        weight_slot = 0u32;
                        weight_phase = weight_phase ^ 1;
                    }
                }
            }
        }
        number += CUBE_COUNT_X;
    }
}

/// What the storing warp of a warpgroup does: hands the buffer over, with the residual in it, takes the result away and its
/// moments with it. A cube keeps to one tile of channels, so that it leaves one part of moments an image.
#[cube]
fn store<E: Float, NM: Size>(
    base: u32,
    group: u32,
    out: &TensorMap<E, Tiled>,
    residual: ComptimeOption<&TensorMap<E, Tiled>>,
    moments: &mut [f32],
    problem: &Problem,
    #[comptime] form: Form,
) {
    let out_map = tensor_map_address(out);
    let result = base + comptime!(form.results_at()) + group * comptime!(form.result_bytes());
    let ready = base + comptime!(form.result_ready()) + group * BARRIER_BYTES;
    let done = base + comptime!(form.result_done()) + group * BARRIER_BYTES;
    let lane = UNIT_POS % WARP;
    let mut phase = 0u32;
    let mut number = CUBE_POS_X;
    for image in 0..problem.images {
        let end = problem.tiles / problem.images * (image + 1);
        let mut measured = LaneMoments {
            count: 0.0f32,
            means: Array::new(LANE_CHANNELS),
            m2s: Array::new(LANE_CHANNELS),
        };
        #[unroll]
        for i in 0..LANE_CHANNELS {
            measured.means[i] = 0.0f32;
            measured.m2s[i] = 0.0f32;
        }
        while number < end {
            let tile = tile(number, problem, form);
            let channel = i32::cast_from(tile.channel + group * GROUP_CHANNELS);
            if lane == 0 {
                #[comptime]
                match residual {
                    ComptimeOption::Some(residual) => {
                        barrier_expect(ready, comptime!(form.result_bytes()));
                        tma_load_image(
                            result,
                            tensor_map_address(residual),
                            channel,
                            i32::cast_from(tile.x),
                            i32::cast_from(tile.y),
                            i32::cast_from(tile.image),
                            ready,
                        );
                    }
                    ComptimeOption::None => barrier_arrive(ready),
                }
            }
            barrier_wait(done, phase);
            phase = phase ^ 1;
            if lane == 0 {
                if comptime!(form.phases() == 2) {
                    tma_store_phase(
                        result,
                        out_map,
                        channel,
                        i32::cast_from(tile.phase_x),
                        i32::cast_from(tile.x),
                        i32::cast_from(tile.phase_y),
                        i32::cast_from(tile.y),
                    );
                } else {
                    tma_store_image(
                        result,
                        out_map,
                        channel,
                        i32::cast_from(tile.x),
                        i32::cast_from(tile.y),
                        i32::cast_from(tile.image),
                    );
                }
            }
            if comptime!(form.moments) {
                measure::<NM>(result, lane, &tile, problem, &mut measured, form);
            }
            if lane == 0 {
                tma_store_wait_read();
            }
            // The buffer is handed over when every lane has read it.
            sync_plane();
            number += CUBE_COUNT_X;
        }
        if comptime!(form.moments) {
            // Lanes with the same channels, other pixels.
            #[unroll]
            for step in 0..2u32 {
                let mask = comptime!(8u32 << step);
                let others = shuffle_xor(measured.count, mask);
                let share = others / f32::max(measured.count + others, 1.0);
                #[unroll]
                for i in 0..LANE_CHANNELS {
                    let mean = shuffle_xor(measured.means[i], mask);
                    let m2 = shuffle_xor(measured.m2s[i], mask);
                    merge(&mut measured, i, share, mean, m2);
                }
                measured.count += others;
            }
            let tile_channel = CUBE_POS_X % problem.channel_tiles * comptime!(form.tile_channels());
            let channel = tile_channel + group * GROUP_CHANNELS + lane * comptime!(LANE_CHANNELS as u32);
            let parts = CUBE_COUNT_X / problem.channel_tiles;
            let part = image * parts + CUBE_POS_X / problem.channel_tiles;
            let plane = problem.channels_out as usize;
            let at = part as usize * comptime!(MOMENTS) * plane + channel as usize;
            // Channels are a multiple of 8.
            if lane < 8 && channel < problem.channels_out {
                #[unroll]
                for i in 0..LANE_CHANNELS {
                    moments[at + i] = measured.count;
                    moments[at + plane + i] = measured.means[i];
                    moments[at + 2 * plane + i] = measured.m2s[i];
                }
            }
        }
    }
    if lane == 0 {
        tma_store_wait();
    }
}

/// Merges the moments of a result in shared memory into those of the tiles before it. A lane has 16 bytes of every fourth
/// pixel.
#[cube]
fn measure<NM: Size>(
    result: u32,
    lane: u32,
    tile: &Tile,
    problem: &Problem,
    measured: &mut LaneMoments,
    #[comptime] form: Form,
) {
    let half = comptime!(form.half);
    let height = problem.height - tile.y;
    let width = problem.width - tile.x;
    let row = lane / 8;
    let column = lane % 8;
    let even = result + row * ROW_BYTES + (column ^ row) * 16;
    let odd = result + (row + 4) * ROW_BYTES + (column ^ (row + 4)) * 16;
    // Deviations from the first pixel, so that a mean far from zero costs no digits.
    let first = load_shared::<NM>(result + column * 16);
    let mut from = Array::<f32>::new(LANE_CHANNELS);
    let mut sums = Array::<f32>::new(LANE_CHANNELS);
    let mut squares = Array::<f32>::new(LANE_CHANNELS);
    #[unroll]
    for i in 0..LANE_CHANNELS {
        from[i] = unpack(first.extract(comptime!(i / 2)), comptime!(i % 2 == 1), half);
        sums[i] = 0.0f32;
        squares[i] = 0.0f32;
    }
    let mut count = 0.0f32;
    for block in 0..comptime!(form.tile_pixels() / 32) {
        // Loads of a block are in flight together: the tensor cores keep shared memory busy.
        let mut loaded = Array::<Vector<u32, NM>>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            let rows = if comptime!(i % 2 == 0) { even } else { odd };
            loaded[i] = load_shared::<NM>(rows + block * (32 * ROW_BYTES) + comptime!(i as u32 / 2 * 8 * ROW_BYTES));
        }
        #[unroll]
        for i in 0..8usize {
            let pixel = block * 32 + comptime!(i as u32 * 4);
            let y = pixel / comptime!(form.tile_width);
            let x = pixel % comptime!(form.tile_width) + row;
            if y < height && x < width {
                count += 1.0;
                #[unroll]
                for channel in 0..LANE_CHANNELS {
                    let pair = loaded[i].extract(comptime!(channel / 2));
                    let deviation = unpack(pair, comptime!(channel % 2 == 1), half) - from[channel];
                    sums[channel] += deviation;
                    squares[channel] += deviation * deviation;
                }
            }
        }
    }
    let share = count / f32::max(measured.count + count, 1.0);
    let inverse = 1.0 / f32::max(count, 1.0);
    #[unroll]
    for i in 0..LANE_CHANNELS {
        let mean = sums[i] * inverse;
        merge(measured, i, share, from[i] + mean, squares[i] - sums[i] * mean);
    }
    measured.count += count;
}

/// Heights and widths of the tiles of that many warpgroups.
fn tile_shapes(groups: u32) -> [(u32, u32); 4] {
    match groups {
        3 => [(12, 16), (24, 8), (6, 32), (3, 64)],
        _ => [(16, 16), (8, 32), (32, 8), (4, 64)],
    }
}

/// A convolution to run, of multiples of 8 channels as TMA wants them: buffers are contiguous, weights `[phases^2, channels_out, taps^2 * channels_in]`.
pub(in crate::gpu) struct HopperConv<'a> {
    pub dtype: ElemType,
    pub half: Half,
    pub taps: u32,
    pub batch: usize,
    pub height: usize,
    pub width: usize,
    pub channels_in: usize,
    pub channels_out: usize,
    pub x: &'a Handle,
    pub weight: &'a Handle,
    pub bias: &'a Handle,
    pub residual: Option<&'a Handle>,
    /// Whether moments of the result are wanted.
    pub measure: bool,
    pub out: &'a Handle,
    pub multiprocessors: u32,
}

impl HopperConv<'_> {
    /// The form with the tile that wastes least of channels and of the image's area, and among those loads the smallest halo.
    fn form(&self) -> Form {
        let waste = |groups: &u32| self.channels_out.next_multiple_of((groups * GROUP_CHANNELS) as usize);
        let groups = [2, 3].into_iter().min_by_key(waste).unwrap_or(2);
        let cost = |&(tile_height, tile_width): &(u32, u32)| {
            let tiles = self.height.div_ceil(tile_height as usize) * self.width.div_ceil(tile_width as usize);
            (tiles, tile_height.abs_diff(tile_width))
        };
        let shapes = tile_shapes(groups);
        let (tile_height, tile_width) = shapes.into_iter().min_by_key(cost).unwrap_or(shapes[0]);
        Form {
            half: self.half,
            taps: self.taps,
            groups,
            // So few channels are not worth a kernel of their own.
            tail_steps: match self.channels_in as u32 {
                ..ROW_CHANNELS => 0,
                channels => (channels % ROW_CHANNELS).div_ceil(MMA_DEPTH),
            },
            tile_height,
            tile_width,
            residual: self.residual.is_some(),
            moments: self.measure,
        }
    }

    /// Enqueues the kernel; moments of the result are returned if they were asked for.
    pub fn launch(self, client: &Client) -> Option<Moments> {
        let form = self.form();
        let phases = form.phases() as usize;
        let (tile_height, tile_width) = (form.tile_height as usize, form.tile_width as usize);
        let (tiles_y, tiles_x) = (self.height.div_ceil(tile_height), self.width.div_ceil(tile_width));
        let channel_tiles = self.channels_out.div_ceil(form.tile_channels() as usize);
        // A phase of a doubled image is seen through five dimensions, which leaves none for the batch.
        let launches = if phases == 2 { self.batch } else { 1 };
        let images = self.batch / launches;
        let image_tiles = tiles_y * tiles_x * phases * phases * channel_tiles;
        // Every cube has tiles of the same channels, so the cubes of one tile of channels are the parts of its moments.
        // One of them may have none of an image: a count of 0.
        let parts = (self.multiprocessors as usize / channel_tiles).clamp(1, images * image_tiles / channel_tiles);
        let size = self.dtype.size();
        let plane = MOMENTS * self.channels_out * size_of::<f32>();
        let moments = self.measure.then(|| client.empty(self.batch * parts * plane));

        let taps = (self.taps * self.taps) as usize;
        let x_pixels = self.height * self.width;
        for launch in 0..launches {
            let x = self
                .x
                .clone()
                .offset_start((launch * x_pixels * self.channels_in * size) as u64);
            let out = self.out.clone();
            let out = out.offset_start((launch * x_pixels * phases * phases * self.channels_out * size) as u64);
            let image = |channels: usize| [x_pixels * channels, self.width * channels, channels, 1];
            let shape = |channels: usize| [images, self.height, self.width, channels];
            let halo = [1, form.halo_height() as usize, tile_width, ROW_CHANNELS as usize];
            let tile = [1, tile_height, tile_width, ROW_CHANNELS as usize];
            let map = |handle: Handle, tile: &[usize], strides: &[usize], shape: &[usize]| {
                // Safety: strides and shape are those of the buffer.
                unsafe { tensor_map(handle, self.dtype, tile, strides, shape) }
            };
            let depth = taps * self.channels_in;
            let weights = map(
                self.weight.clone(),
                &[form.tile_channels() as usize, ROW_CHANNELS as usize],
                &[depth, 1],
                &[phases * phases * self.channels_out, depth],
            );
            let x_map = map(x, &halo, &image(self.channels_in), &shape(self.channels_in));
            let out_map = if phases == 2 {
                let row = 2 * self.width * self.channels_out;
                map(
                    out,
                    &[tile_height, 1, tile_width, 1, ROW_CHANNELS as usize],
                    &[2 * row, row, 2 * self.channels_out, self.channels_out, 1],
                    &[self.height, 2, self.width, 2, self.channels_out],
                )
            } else {
                map(out, &tile, &image(self.channels_out), &shape(self.channels_out))
            };
            let residual = self.residual.map(|residual| {
                map(
                    residual.clone(),
                    &tile,
                    &image(self.channels_out),
                    &shape(self.channels_out),
                )
            });
            let tiles = images * image_tiles;
            // Safety: the buffer was made for this; without moments any buffer does, for nothing is written.
            let moments = unsafe {
                match &moments {
                    Some(moments) => {
                        let part = moments.clone().offset_start((launch * parts * plane) as u64);
                        buffer(&part, images * parts * MOMENTS * self.channels_out)
                    }
                    None => buffer(self.bias, self.channels_out),
                }
            };
            let problem = ProblemLaunch::new(
                self.height as u32,
                self.width as u32,
                self.channels_in as u32,
                self.channels_out as u32,
                images as u32,
                tiles_y as u32,
                tiles_x as u32,
                channel_tiles as u32,
                tiles as u32,
            );
            // Safety: TMA checks coordinates; bias and moments are read and written below `channels_out` only.
            unsafe {
                hopper_conv_kernel::launch_unchecked(
                    client,
                    CubeCount::Static((parts * channel_tiles) as u32, 1, 1),
                    CubeDim::new_1d(form.units()),
                    form.sum_vector(),
                    4usize,
                    x_map,
                    weights,
                    out_map,
                    residual.into(),
                    buffer(self.bias, self.channels_out),
                    moments,
                    problem,
                    form,
                    self.dtype,
                )
            }
        }
        moments.map(|handle| Moments { handle, parts })
    }
}

/// Forms of the kernel as CUDA C++: all of bf16's without a tail, the others with one tile.
#[cfg(test)]
pub(in crate::gpu) fn emit_all() {
    for groups in [2, 3] {
        for taps in [1, 2, 3] {
            for (residual, moments) in [(false, false), (false, true), (true, true)] {
                let shapes = tile_shapes(groups);
                let form = |half, (tile_height, tile_width), tail_steps| Form {
                    half,
                    taps,
                    groups,
                    tail_steps,
                    tile_height,
                    tile_width,
                    residual,
                    moments,
                };
                for shape in shapes {
                    emit_form(form(Half::Bf16, shape, 0));
                }
                emit_form(form(Half::F16, shapes[0], 0));
                emit_form(form(Half::Bf16, shapes[0], 2));
            }
        }
    }
}

#[cfg(test)]
fn emit_form(form: Form) {
    use crate::gpu::emit::{device_properties, emit, settings, target_properties};
    use cubecl::ir::FloatKind;

    let argument = || BufferCompilationArg { inplace: None };
    let kernel = hopper_conv_kernel::HopperConvKernel::new(
        settings(CubeDim::new_1d(form.units())),
        device_properties(),
        target_properties(),
        (),
        (),
        (),
        match form.residual {
            true => ComptimeOptionCompilationArg::Some(()),
            false => ComptimeOptionCompilationArg::None,
        },
        argument(),
        argument(),
        ProblemCompilationArg {
            height: (),
            width: (),
            channels_in: (),
            channels_out: (),
            images: (),
            tiles_y: (),
            tiles_x: (),
            channel_tiles: (),
            tiles: (),
        },
        form.sum_vector(),
        4,
        form,
        ElemType::Float(match form.half {
            Half::F16 => FloatKind::F16,
            Half::Bf16 => FloatKind::BF16,
        }),
    );
    let Form {
        half,
        taps,
        groups,
        tail_steps,
        tile_height,
        tile_width,
        residual,
        moments,
    } = form;
    let half = half.name();
    let name =
        format!("conv_{half}_{taps}taps_{groups}groups_{tile_height}x{tile_width}_{tail_steps}_{residual}_{moments}");
    emit(&name, &kernel);
}

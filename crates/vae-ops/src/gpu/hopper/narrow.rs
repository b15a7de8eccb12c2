//! The channels-last convolution to a picture: at most 8 output channels.
//!
//! The tile of [`super::conv`] would be 97% padding here. Pixels become the rows of wgmma and the few output channels its
//! columns; all weights stay in shared memory. Little is computed for each byte, so what counts is loads in flight.

use cubecl::{prelude::*, server::Handle};
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::{ptx::*, tensor_map};
use crate::gpu::launch::buffer;

/// Columns of the smallest wgmma, and the most output channels.
const CHANNELS: u32 = 8;
/// Side of a tile of pixels, and rows of wgmma.
const TILE: u32 = 16;
const ROWS: u32 = 64;
/// Units of a warpgroup, of which two multiply; a warp loads.
const GROUP: u32 = 128;
const LOADER: u32 = 2 * GROUP;
const UNITS: u32 = LOADER + 32;
/// Products of 64 pixels that a warpgroup has to itself.
const BLOCKS: u32 = TILE * TILE / ROWS / 2;
/// Sums of a unit.
const SUMS: u32 = BLOCKS * ROWS * CHANNELS / GROUP;
const PIXEL_SLOTS: u32 = 2;
/// Bytes of 8 channels by 64 of k.
const WEIGHT_BYTES: u32 = CHANNELS * ROW_BYTES;
/// Cubes of a multiprocessor: one waits while the other multiplies.
const CUBES: u32 = 2;

/// Everything that is compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    half: Half,
    /// Taps on each axis, odd.
    taps: u32,
    /// Blocks of 64 input channels.
    channel_blocks: u32,
}

impl Form {
    fn pixel_bytes(&self) -> u32 {
        (TILE + self.taps - 1) * TILE * ROW_BYTES
    }
    /// Loads of pixels for a tile.
    fn loads(&self) -> u32 {
        self.taps * self.channel_blocks
    }
    fn weights_at(&self) -> u32 {
        PIXEL_SLOTS * self.pixel_bytes()
    }
    fn weight_blocks(&self) -> u32 {
        self.taps * self.loads()
    }
    fn barriers_at(&self) -> u32 {
        self.weights_at() + self.weight_blocks() * WEIGHT_BYTES
    }
    fn shared_bytes(&self) -> u32 {
        self.barriers_at() + (2 * PIXEL_SLOTS + 1) * BARRIER_BYTES
    }

    /// The sums of a tile, in PTX; see the wide convolution's.
    ///
    /// Inputs: `$1` weight descriptor, `$2` pixel descriptor, `$3` address of the barriers, `$4` whether this unit signals,
    /// `$5` and `$6` slot and phase of the pixels' ring.
    fn main_loop(&self) -> String {
        let half = self.half.name();
        let mut ptx = format!(
            "{{\n.reg .pred done, adds, signals, wraps;\n.reg .b32 bar, count, slot, phase;\n.reg .b64 off, wdesc, pdesc, w, p;\n\
             mov.u32 slot, $5;\nmov.u32 phase, $6;\nmov.u32 count, 0;\nmov.u64 wdesc, $1;\nsetp.ne.u32 signals, $4, 0;\nLOOP:\n\
             shl.b32 bar, slot, 3;\nadd.u32 bar, bar, $3;\nPIXELS:\n\
             mbarrier.try_wait.parity.shared::cta.b64 done, [bar], phase;\n@!done bra PIXELS;\n\
             mul.wide.u32 off, slot, {};\nadd.u64 pdesc, $2, off;\nsetp.ne.u32 adds, count, 0;\nwgmma.fence.sync.aligned;\n",
            self.pixel_bytes() / 16
        );
        for tap in 0..self.taps {
            for step in 0..ROW_CHANNELS / MMA_DEPTH {
                let along_k = step * MMA_DEPTH * 2 / 16;
                ptx += &format!(
                    "add.u64 w, wdesc, {};\n",
                    tap * self.loads() * WEIGHT_BYTES / 16 + along_k
                );
                for block in 0..BLOCKS {
                    let rows_down = (tap * TILE + block * ROWS) * ROW_BYTES / 16;
                    let sums = (0..4)
                        .map(|i| format!("%{}", block * 4 + i))
                        .collect::<Vec<_>>()
                        .join(", ");
                    let adds = if tap == 0 && step == 0 { "adds" } else { "1" };
                    ptx += &format!(
                        "add.u64 p, pdesc, {};\n\
                         wgmma.mma_async.sync.aligned.m64n8k16.f32.{half}.{half} {{{sums}}}, p, w, {adds}, 1, 1, 0, 0;\n",
                        rows_down + along_k
                    );
                }
            }
        }
        ptx += &format!(
            "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n\
             @signals mbarrier.arrive.shared::cta.b64 _, [bar+{}];\nadd.u32 slot, slot, 1;\n\
             setp.eq.u32 wraps, slot, {PIXEL_SLOTS};\n@wraps mov.u32 slot, 0;\n@wraps xor.b32 phase, phase, 1;\n\
             add.u64 wdesc, wdesc, {};\nadd.u32 count, count, 1;\nsetp.lt.u32 wraps, count, {};\n@wraps bra LOOP;\n}}",
            PIXEL_SLOTS * BARRIER_BYTES,
            WEIGHT_BYTES / 16,
            self.loads()
        );
        ptx
    }
}

#[cube]
fn main_loop<N: Size>(
    weights: u64,
    pixels: u64,
    barriers: u32,
    signals: u32,
    slot: u32,
    phase: u32,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let body = comptime!(form.main_loop());
    let sums: Vector<f32, N>;
    gpu_asm!(
        "{body} /* {d} {w} {p} {b} {s} {ps} {pp} */",
        d = out(_) sums, w = in(_) u64::cast_from(weights), p = in(_) u64::cast_from(pixels), b = in(_) u32::cast_from(barriers),
        s = in(_) u32::cast_from(signals), ps = in(_) u32::cast_from(slot), pp = in(_) u32::cast_from(phase),
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
    tiles_y: u32,
    tiles_x: u32,
    tiles: u32,
}

#[cube(launch_unchecked)]
fn hopper_narrow_conv_kernel<E: Float, N: Size>(
    x: &TensorMap<E, Tiled>,
    weights: &TensorMap<E, Tiled>,
    bias: &[f32],
    out: &mut [E],
    problem: Problem,
    #[comptime] form: Form,
    #[define(E)] _dtype: ElemType,
) {
    let shared = Shared::<[u64]>::new_aligned_slice(comptime!(form.shared_bytes() as usize / 8), 1024usize);
    let base = unsafe { generic_to_shared::<u64>(shared.as_slice().as_ptr_unchecked()) };
    let pixels_full = base + comptime!(form.barriers_at());
    let pixels_empty = pixels_full + comptime!(PIXEL_SLOTS * BARRIER_BYTES);
    let weights_full = pixels_empty + comptime!(PIXEL_SLOTS * BARRIER_BYTES);
    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..PIXEL_SLOTS {
            barrier_init(pixels_full + comptime!(i * BARRIER_BYTES), 1u32);
            barrier_init(pixels_empty + comptime!(i * BARRIER_BYTES), 2u32);
        }
        barrier_init(weights_full, 1u32);
        barrier_init_fence();
    }
    sync_cube();

    let per_image = problem.tiles_y * problem.tiles_x;
    let mut number = CUBE_POS_X;
    if UNIT_POS < LOADER {
        let group = UNIT_POS / GROUP;
        let unit = UNIT_POS % GROUP;
        let lane = unit % 32;
        let weight_descriptor = descriptor(base + comptime!(form.weights_at()));
        let pixel_descriptor = descriptor(base + group * comptime!(BLOCKS * ROWS * ROW_BYTES));
        let channel = lane % 4 * 2;
        let mut bias_first = 0.0f32;
        let mut bias_second = 0.0f32;
        if channel < problem.channels_out {
            bias_first = bias[channel as usize];
        }
        if channel + 1 < problem.channels_out {
            bias_second = bias[(channel + 1) as usize];
        }
        barrier_wait(weights_full, 0u32);
        let mut taken = 0u32;
        while number < problem.tiles {
            let sums = main_loop::<N>(
                weight_descriptor,
                pixel_descriptor,
                pixels_full,
                u32::cast_from(unit == 0),
                taken % PIXEL_SLOTS,
                taken / PIXEL_SLOTS % 2,
                form,
            );
            taken += comptime!(form.loads());
            let index = number % per_image;
            let image = number / per_image;
            #[unroll]
            for item in 0..comptime!(2 * BLOCKS) {
                // Two rows of each product, 8 apart.
                let row = comptime!(item / 2 * ROWS + item % 2 * 8) + unit / 32 * 16 + lane / 4;
                let pixel = group * comptime!(BLOCKS * ROWS) + row;
                let y = index / problem.tiles_x * TILE + pixel / TILE;
                let x = index % problem.tiles_x * TILE + pixel % TILE;
                if y < problem.height && x < problem.width {
                    let line = (image * problem.height + y) as usize;
                    let at =
                        (line * problem.width as usize + x as usize) * problem.channels_out as usize + channel as usize;
                    let first = comptime!((item * 2) as usize);
                    if channel < problem.channels_out {
                        out[at] = E::cast_from(sums.extract(first) + bias_first);
                    }
                    if channel + 1 < problem.channels_out {
                        out[at + 1] = E::cast_from(sums.extract(comptime!(first + 1)) + bias_second);
                    }
                }
            }
            number += CUBE_COUNT_X;
        }
    } else if UNIT_POS == LOADER {
        let x_map = tensor_map_address(x);
        let weight_map = tensor_map_address(weights);
        barrier_expect(weights_full, comptime!(form.weight_blocks() * WEIGHT_BYTES));
        for tap in 0..comptime!(form.taps * form.taps) {
            for block in 0..comptime!(form.channel_blocks) {
                tma_load_2d(
                    base + comptime!(form.weights_at()) + (tap * comptime!(form.channel_blocks) + block) * WEIGHT_BYTES,
                    weight_map,
                    i32::cast_from(tap * problem.channels_in + block * ROW_CHANNELS),
                    0i32,
                    weights_full,
                );
            }
        }
        let before = comptime!((form.taps / 2) as i32);
        let mut slot = 0u32;
        let mut phase = 1u32;
        while number < problem.tiles {
            let index = number % per_image;
            let y = i32::cast_from(index / problem.tiles_x * TILE) - before;
            let x = i32::cast_from(index % problem.tiles_x * TILE) - before;
            for tap in 0..comptime!(form.taps) {
                for block in 0..comptime!(form.channel_blocks) {
                    let full = pixels_full + slot * BARRIER_BYTES;
                    barrier_wait(pixels_empty + slot * BARRIER_BYTES, phase);
                    barrier_expect(full, comptime!(form.pixel_bytes()));
                    tma_load_image(
                        base + slot * comptime!(form.pixel_bytes()),
                        x_map,
                        i32::cast_from(block * ROW_CHANNELS),
                        x + i32::cast_from(tap),
                        y,
                        i32::cast_from(number / per_image),
                        full,
                    );
                    slot += 1;
                    if slot == PIXEL_SLOTS {
                        slot = 0u32;
                        phase = phase ^ 1;
                    }
                }
            }
            number += CUBE_COUNT_X;
        }
    }
}

/// A convolution of at most 512 channels, a multiple of 8, to at most 8: buffers are contiguous, weights `[channels_out, taps^2 * channels_in]`.
pub(in crate::gpu) struct HopperNarrowConv<'a> {
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
    pub out: &'a Handle,
    pub multiprocessors: u32,
}

impl HopperNarrowConv<'_> {
    /// Enqueues the kernel.
    pub fn launch(self, client: &Client) {
        let form = Form {
            half: self.half,
            taps: self.taps,
            channel_blocks: (self.channels_in as u32).div_ceil(ROW_CHANNELS),
        };
        let (tiles_y, tiles_x) = (self.height.div_ceil(TILE as usize), self.width.div_ceil(TILE as usize));
        let tiles = (self.batch * tiles_y * tiles_x) as u32;
        let (row, depth) = (
            self.width * self.channels_in,
            (self.taps * self.taps) as usize * self.channels_in,
        );
        let map = |handle: &Handle, tile: &[usize], strides: &[usize], shape: &[usize]| {
            // Safety: strides and shape are those of the buffer.
            unsafe { tensor_map(handle.clone(), self.dtype, tile, strides, shape) }
        };
        let x = map(
            self.x,
            &[1, (TILE + self.taps - 1) as usize, TILE as usize, ROW_CHANNELS as usize],
            &[self.height * row, row, self.channels_in, 1],
            &[self.batch, self.height, self.width, self.channels_in],
        );
        let weights = map(
            self.weight,
            &[CHANNELS as usize, ROW_CHANNELS as usize],
            &[depth, 1],
            &[self.channels_out, depth],
        );
        let problem = ProblemLaunch::new(
            self.height as u32,
            self.width as u32,
            self.channels_in as u32,
            self.channels_out as u32,
            tiles_y as u32,
            tiles_x as u32,
            tiles,
        );
        // Safety: TMA checks coordinates; the rest is checked against `problem`.
        unsafe {
            hopper_narrow_conv_kernel::launch_unchecked(
                client,
                CubeCount::Static((CUBES * self.multiprocessors).min(tiles), 1, 1),
                CubeDim::new_1d(UNITS),
                SUMS as usize,
                x,
                weights,
                buffer(self.bias, self.channels_out),
                buffer(self.out, self.batch * self.height * self.width * self.channels_out),
                problem,
                form,
                self.dtype,
            )
        }
    }
}

/// Every form of the kernel that models have, as CUDA C++.
#[cfg(test)]
pub(in crate::gpu) fn emit_all() {
    use crate::gpu::emit::{device_properties, emit, settings, target_properties};
    use cubecl::ir::FloatKind;

    let argument = || BufferCompilationArg { inplace: None };
    for (half, float) in [(Half::Bf16, FloatKind::BF16), (Half::F16, FloatKind::F16)] {
        for channel_blocks in [1, 2] {
            let form = Form {
                half,
                taps: 3,
                channel_blocks,
            };
            let kernel = hopper_narrow_conv_kernel::HopperNarrowConvKernel::new(
                settings(CubeDim::new_1d(UNITS)),
                device_properties(),
                target_properties(),
                (),
                (),
                argument(),
                argument(),
                ProblemCompilationArg {
                    height: (),
                    width: (),
                    channels_in: (),
                    channels_out: (),
                    tiles_y: (),
                    tiles_x: (),
                    tiles: (),
                },
                SUMS as usize,
                form,
                ElemType::Float(float),
            );
            emit(&format!("narrow_conv_{}_{channel_blocks}", half.name()), &kernel);
        }
    }
}

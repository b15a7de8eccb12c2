//! The second kernel of attention: probabilities times values, for each range of keys. A plain product.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::{BLOCK, GROUP, GROUP_ROWS, LOADER, Work, key_tiles};
use crate::gpu::hopper::{conv::SHARED_MEMORY, ptx::*};

/// Keys of a step, one row of a swizzled box of probabilities.
const STEP_KEYS: u32 = ROW_CHANNELS;
/// Bytes of [`BLOCK`] rows of probabilities, and of a box of values: [`STEP_KEYS`] by [`ROW_CHANNELS`].
const PROBABILITY_BYTES: u32 = BLOCK * ROW_BYTES;
const VALUE_BOX_BYTES: u32 = STEP_KEYS * ROW_BYTES;
/// Left for barriers.
const BARRIERS: u32 = 256;
const MOST_SLOTS: u32 = 8;

/// The form of the kernel: everything that is compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    pub half: Half,
    pub channels: u32,
}

impl Form {
    /// Channels of a tile: the widest that divide all of them.
    pub fn width(&self) -> u32 {
        let divides = |width: &u32| self.channels.is_multiple_of(*width);
        [256, 192, 128].into_iter().find(divides).unwrap_or(ROW_CHANNELS)
    }
    pub fn column_tiles(&self) -> u32 {
        self.channels / self.width()
    }
    /// Sums in a unit's registers.
    fn sums(&self) -> u32 {
        GROUP_ROWS * self.width() / GROUP
    }
    /// Length of the vector that holds them, a power of two; what is left over is never used.
    pub fn sums_length(&self) -> usize {
        self.sums().next_power_of_two() as usize
    }
    fn value_boxes(&self) -> u32 {
        self.width() / ROW_CHANNELS
    }
    /// Bytes of a slot: probabilities, then boxes of values.
    fn slot_bytes(&self) -> u32 {
        PROBABILITY_BYTES + self.value_boxes() * VALUE_BOX_BYTES
    }
    fn slots(&self) -> u32 {
        ((SHARED_MEMORY - BARRIERS) / self.slot_bytes()).min(MOST_SLOTS)
    }
    /// Barriers, in order: full, then empty.
    fn full(&self) -> u32 {
        self.slots() * self.slot_bytes()
    }
    fn empty(&self) -> u32 {
        self.full() + self.slots() * BARRIER_BYTES
    }
    pub fn shared_bytes(&self) -> u32 {
        self.full() + BARRIERS
    }

    /// The sum over the keys of one tile, in PTX.
    ///
    /// Inputs: `$1` and `$2` descriptors of probabilities and values in the first slot, `$3` address of the barriers, `$4`
    /// whether this unit signals, `$5` and `$6` slot and phase of the ring, `$7` steps to take.
    pub fn main_loop(&self) -> String {
        let sums = (0..self.sums()).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
        let (half, width, slots) = (self.half.name(), self.width(), self.slots());
        let empty = self.empty() - self.full();
        let steps = STEP_KEYS / MMA_DEPTH;
        let mut ptx = format!(
            "{{\n.reg .pred done, adds, signals, wraps;\n.reg .b32 slot, phase, step, full;\n\
             .reg .b64 offset, probability, value, p<4>, v<4>;\n\
             mov.u32 slot, $5;\nmov.u32 phase, $6;\nmov.u32 step, 0;\nsetp.ne.u32 signals, $4, 0;\n\
             LOOP:\nshl.b32 full, slot, 3;\nadd.u32 full, full, $3;\n\
             WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [full], phase;\n@!done bra WAIT;\n\
             mul.wide.u32 offset, slot, {};\nadd.u64 probability, $1, offset;\nadd.u64 value, $2, offset;\n\
             setp.ne.u32 adds, step, 0;\n",
            self.slot_bytes() / 16
        );
        for step in 0..steps {
            // Values are contiguous along the channels, so 16 keys are 16 rows further on.
            let (along_k, rows_down) = (step * MMA_DEPTH * 2 / 16, step * MMA_DEPTH * ROW_BYTES / 16);
            ptx += &format!("add.u64 p{step}, probability, {along_k};\nadd.u64 v{step}, value, {rows_down};\n");
        }
        ptx += "wgmma.fence.sync.aligned;\n";
        for step in 0..steps {
            // The first product of a tile overwrites what the registers hold. The last flag says that values are transposed.
            let adds = if step == 0 { "adds" } else { "1" };
            ptx += &format!(
                "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{half}.{half} {{{sums}}}, p{step}, v{step}, {adds}, 1, 1, 0, 1;\n"
            );
        }
        // Waiting for all is enough: the other warpgroup keeps the tensor cores busy.
        ptx += &format!(
            "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n\
             @signals mbarrier.arrive.shared::cta.b64 _, [full+{empty}];\n\
             add.u32 slot, slot, 1;\nsetp.eq.u32 wraps, slot, {slots};\n@wraps mov.u32 slot, 0;\n\
             @wraps xor.b32 phase, phase, 1;\nadd.u32 step, step, 1;\nsetp.lt.u32 wraps, step, $7;\n@wraps bra LOOP;\n}}"
        );
        ptx
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn main_loop<N: Size>(
    probabilities: u64,
    values: u64,
    barriers: u32,
    signals: u32,
    slot: u32,
    phase: u32,
    steps: u32,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let body = comptime!(form.main_loop());
    let sums: Vector<f32, N>;
    // The comment names every operand, because each must occur.
    gpu_asm!(
        "{body} /* {d} {p} {v} {b} {s} {l} {h} {n} */",
        d = out(_) sums, p = in(_) u64::cast_from(probabilities), v = in(_) u64::cast_from(values), b = in(_) u32::cast_from(barriers),
        s = in(_) u32::cast_from(signals), l = in(_) u32::cast_from(slot), h = in(_) u32::cast_from(phase), n = in(_) u32::cast_from(steps),
    );
    sums
}

/// The place of a tile.
#[derive(CubeType, Clone, Copy)]
struct Tile {
    /// First row in the chunk, and column.
    row: u32,
    column: u32,
    range: u32,
    /// Its first key, and the steps from there.
    key: u32,
    steps: u32,
}

#[cube]
fn tile(number: u32, work: &Work, #[comptime] form: Form) -> Tile {
    let columns = comptime!(form.column_tiles());
    let range = number / (work.blocks * columns);
    let tiles = key_tiles(work, range);
    Tile {
        row: number / columns % work.blocks * BLOCK,
        column: number % columns * comptime!(form.width()),
        range,
        key: tiles.first * BLOCK,
        steps: tiles.count * comptime!(BLOCK / STEP_KEYS),
    }
}

/// `partials` are `[ranges, chunk_rows, channels]`; the cubes share `ranges * blocks * column_tiles` tiles.
#[cube(launch_unchecked)]
pub fn attention_mix_kernel<E: Float, N: Size>(
    probabilities: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    partials: &mut [f32],
    work: Work,
    #[comptime] form: Form,
    #[define(E)] _dtype: ElemType,
) {
    let shared = Shared::<[u64]>::new_aligned_slice(comptime!(form.shared_bytes() as usize / 8), 1024usize);
    let base = unsafe { generic_to_shared::<u64>(shared.as_slice().as_ptr_unchecked()) };
    let full = base + comptime!(form.full());
    let empty = base + comptime!(form.empty());
    let slots = comptime!(form.slots());
    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..slots {
            barrier_init(full + comptime!(i * BARRIER_BYTES), 1u32);
            barrier_init(empty + comptime!(i * BARRIER_BYTES), 2u32);
        }
        barrier_init_fence();
    }
    sync_cube();

    let tiles = work.ranges * work.blocks * comptime!(form.column_tiles());
    if UNIT_POS < LOADER {
        let group = UNIT_POS / GROUP;
        let unit = UNIT_POS % GROUP;
        let warp = unit / 32;
        let lane = unit % 32;
        let probability_descriptor = descriptor(base + group * comptime!(GROUP_ROWS * ROW_BYTES));
        let value_descriptor = descriptor_transposed(base + PROBABILITY_BYTES, VALUE_BOX_BYTES);
        let pointer = unsafe { partials.as_mut_ptr_unchecked() };
        let mut taken = 0u32;
        let mut number = CUBE_POS_X;
        while number < tiles {
            let tile = tile(number, &work, form);
            let sums = main_loop::<N>(
                probability_descriptor,
                value_descriptor,
                full,
                u32::cast_from(unit == 0),
                taken % slots,
                taken / slots % 2,
                tile.steps,
                form,
            );
            taken += tile.steps;
            let row = tile.range * work.chunk_rows + tile.row + group * GROUP_ROWS + warp * 16 + lane / 4;
            let column = tile.column + (lane % 4) * 2;
            let top = element_address(pointer, row, comptime!(form.channels), column);
            let bottom = element_address(pointer, row + 8, comptime!(form.channels), column);
            #[unroll]
            for i in 0..comptime!(form.width() / 8) {
                let first = comptime!((4 * i) as usize);
                let bytes = comptime!(i * 32);
                store_pair(top, bytes, sums.extract(first), sums.extract(comptime!(first + 1)));
                store_pair(
                    bottom,
                    bytes,
                    sums.extract(comptime!(first + 2)),
                    sums.extract(comptime!(first + 3)),
                );
            }
            number += CUBE_COUNT_X;
        }
    } else if UNIT_POS == LOADER {
        let probability_map = tensor_map_address(probabilities);
        let value_map = tensor_map_address(value);
        let mut slot = 0u32;
        let mut phase = 1u32;
        let mut number = CUBE_POS_X;
        while number < tiles {
            let tile = tile(number, &work, form);
            for step in 0..tile.steps {
                let slot_full = full + slot * BARRIER_BYTES;
                barrier_wait(empty + slot * BARRIER_BYTES, phase);
                barrier_expect(slot_full, comptime!(form.slot_bytes()));
                let to = base + slot * comptime!(form.slot_bytes());
                let key = i32::cast_from(tile.key + step * STEP_KEYS);
                tma_load_2d(to, probability_map, key, i32::cast_from(tile.row), slot_full);
                #[unroll]
                for i in 0..comptime!(form.value_boxes()) {
                    let column = i32::cast_from(tile.column + comptime!(i * ROW_CHANNELS));
                    tma_load_2d(
                        to + comptime!(PROBABILITY_BYTES + i * VALUE_BOX_BYTES),
                        value_map,
                        column,
                        key,
                        slot_full,
                    );
                }
                slot += 1;
                if slot == slots {
                    slot = 0u32;
                    phase = phase ^ 1;
                }
            }
            number += CUBE_COUNT_X;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(half: Half, channels: u32) -> Form {
        Form { half, channels }
    }

    #[test]
    fn tiles_cover_the_channels_and_slots_fit() {
        let widths = [64, 128, 192, 256, 64, 192, 64, 256];
        for (channels, width) in (64..=512).step_by(64).zip(widths) {
            let form = form(Half::Bf16, channels);
            assert_eq!(form.width(), width);
            assert_eq!(form.column_tiles() * width, channels);
            assert!(form.slots() >= 4 && form.shared_bytes() <= 232_448);
            assert!(form.empty() + form.slots() * BARRIER_BYTES <= form.shared_bytes());
        }
        assert_eq!(form(Half::Bf16, 512).slots(), 4);
    }

    #[test]
    fn the_loop_multiplies_64_keys_into_all_sums() {
        for half in [Half::Bf16, Half::F16] {
            for channels in (64..=512).step_by(64) {
                let form = form(half, channels);
                let text = form.main_loop();
                assert_eq!(text.matches("wgmma.mma_async").count(), 4);
                assert_eq!(text.matches(&format!("m64n{}k16", form.width())).count(), 4);
                assert_eq!(text.matches('{').count(), text.matches('}').count());
                assert!(text.contains(&format!("%{}}}", form.width() / 2 - 1)));
                for label in ["LOOP:", "WAIT:"] {
                    assert_eq!(text.lines().filter(|line| *line == label).count(), 1);
                }
            }
        }
    }
}

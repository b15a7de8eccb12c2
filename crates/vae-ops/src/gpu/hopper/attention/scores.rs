//! The first kernel of attention: probabilities up to a power of two for each row and range of keys.
//!
//! A cube owns [`BLOCK`] queries and a range of keys. Its queries stay in shared memory while tiles of keys stream through
//! a ring. The scores of a tile are made into probabilities under the products of the next one: two sets of accumulators
//! take turns, and one group of products is always in flight.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::{BLOCK, GROUP, GROUP_ROWS, LOADER, MASKED, Work, key_tiles};
use crate::gpu::hopper::{conv::SHARED_MEMORY, ptx::*};

/// Keys of a tile, as many as a cube has queries.
const TILE_KEYS: u32 = BLOCK;
/// Bytes of [`BLOCK`] rows by [`ROW_CHANNELS`]: a box of queries, and a slot of the ring of keys.
const BOX_BYTES: u32 = BLOCK * ROW_BYTES;
/// Bytes of a warpgroup's rows in a box.
const GROUP_BYTES: u32 = GROUP_ROWS * ROW_BYTES;
/// Bytes that a warpgroup stores at a time: its rows of half a tile.
const STORE_BYTES: u32 = GROUP_BYTES;
/// Left for barriers.
const BARRIERS: u32 = 256;
const MOST_SLOTS: u32 = 8;

/// Scores of a tile in a unit's registers, and 16-column slices of it.
const SCORES: u32 = GROUP_ROWS * TILE_KEYS / GROUP;
const SLICES: u32 = TILE_KEYS / 16;
const SLICE_SCORES: u32 = SCORES / SLICES;

/// What a unit returns: the sums and references of its two rows.
pub const RESULTS: usize = 4;

/// Where the reference of a row lies, in powers of two.
///
/// A probability is stored as `2^(score - reference)`, and a later kernel takes the reference out again. So the reference
/// need not be the maximum, it need only keep what is stored in the type's range. Each row takes one from its first tile
/// of keys and raises it when a later score passes the window's end. That costs: what is stored already must be scaled. It
/// is exact (short of underflow) because references are integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// A reference set anew lies this far above the maximum.
    pub above: f32,
    /// It is raised when a score lies farther above it than this.
    pub raise: f32,
}

impl Window {
    /// bf16 has the range of f32. The first tile's maximum is stored as 2^-24, so that a later score must beat it by 2^96
    /// to cost anything; up to 2^16 keys at 2^72 sum to 2^88, far from 2^127, and keys 2^-102 of the maximum still count.
    ///
    /// f16 ends just below 2^16 and is precise down to 2^-14. The maximum is stored between 2^7 and 2^15: keys 2^-21 of it
    /// are precise and those below 2^-31 are lost, 2^16 of which make 2^-15 of the sum. References are raised more often.
    pub fn of(half: Half) -> Self {
        match half {
            Half::Bf16 => Self {
                above: 24.0,
                raise: 72.0,
            },
            Half::F16 => Self {
                above: -8.0,
                raise: 15.0,
            },
        }
    }
}

/// The form of the kernel: everything that is compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    pub half: Half,
    pub channels: u32,
}

impl Form {
    /// Steps of [`ROW_CHANNELS`] along the channels.
    fn blocks(&self) -> u32 {
        self.channels / ROW_CHANNELS
    }
    pub fn query_bytes(&self) -> u32 {
        self.blocks() * BOX_BYTES
    }
    /// Slots of the ring of keys: as many as fit, 5 beside 512 channels of queries.
    pub fn slots(&self) -> u32 {
        ((SHARED_MEMORY - BARRIERS - 2 * STORE_BYTES - self.query_bytes()) / BOX_BYTES).min(MOST_SLOTS)
    }
    fn keys_at(&self) -> u32 {
        self.query_bytes()
    }
    fn stores_at(&self) -> u32 {
        self.keys_at() + self.slots() * BOX_BYTES
    }
    /// Barriers, in order: full and empty of the ring, then that of the queries.
    fn keys_full(&self) -> u32 {
        self.stores_at() + 2 * STORE_BYTES
    }
    fn keys_empty(&self) -> u32 {
        self.keys_full() + self.slots() * BARRIER_BYTES
    }
    fn queries_full(&self) -> u32 {
        self.keys_empty() + self.slots() * BARRIER_BYTES
    }
    pub fn shared_bytes(&self) -> u32 {
        self.keys_full() + BARRIERS
    }
    /// From a product of query and key to powers of two.
    fn scale(&self) -> f32 {
        (std::f64::consts::LOG2_E / f64::from(self.channels).sqrt()) as f32
    }

    /// All that a multiplying unit does, in PTX, because accumulators that cross between blocks of inline assembly would
    /// be copied and wgmma serialised. Its inputs are the constants of [`Ptx`], its results `%0` to `%3`.
    pub fn main_loop(self) -> String {
        Ptx::new(self).main_loop()
    }
}

// Inputs of the text, in the order of `main_loop`'s arguments.
/// Descriptors of this warpgroup's queries and of the ring's first slot.
const QUERIES: &str = "$1";
const KEYS: &str = "$2";
/// Address of the ring's barriers.
const RING: &str = "$3";
/// Whether this unit signals and stores for its warpgroup. It is the first one.
const SIGNALS: &str = "$4";
/// The warpgroup's named barrier.
const GROUP_BARRIER: &str = "$5";
/// Where this lane's row of a matrix lies in the store buffer; the first unit's is where the buffer starts.
const LANE_STORE: &str = "$6";
/// Tensor map of the probabilities.
const MAP: &str = "$7";
/// First key of the range, the end of its tiles, and number of all keys.
const FIRST_KEY: &str = "$8";
const END_KEY: &str = "$9";
const TOKENS: &str = "$10";
/// Address of the probabilities, their row length, and the warp's first row; the first unit's is the warpgroup's, too.
const PROBABILITIES: &str = "$11";
const ROW_LENGTH: &str = "$12";
const WARP_ROW: &str = "$13";
/// First column of this lane in a slice's half.
const LANE_COLUMN: &str = "$14";

const DECLARATIONS: &str = "\
.reg .pred done, never, signals, flag, raise0, raise1;
.reg .b32 key, address, full, previous_empty, phase, t0, t1, t2, t3, packed<4>;
.reg .b64 query<4>, keys<4>, slot, row0, row1, along, at;
.reg .f32 x<64>, y<64>, e<8>, sum0, sum1, reference0, reference1, minus0, minus1, maximum0, maximum1;
";

/// A constant as PTX writes it.
fn float(value: f32) -> String {
    format!("0f{:08X}", value.to_bits())
}

/// Parts of [`Ptx::part`], one for each block of products where there are 512 channels.
const PARTS: u32 = 8;

/// Builds the text. `scores` is `x` or `y`, one of the two sets of accumulators.
struct Ptx {
    form: Form,
    window: Window,
    text: String,
    labels: u32,
}

impl Ptx {
    fn new(form: Form) -> Self {
        Self {
            form,
            window: Window::of(form.half),
            text: String::new(),
            labels: 0,
        }
    }

    fn line(&mut self, text: &str) {
        self.text.push_str(text);
        self.text.push('\n');
    }

    /// A number for labels that no other has.
    fn label(&mut self) -> u32 {
        self.labels += 1;
        self.labels
    }

    fn main_loop(mut self) -> String {
        let blocks = self.form.blocks();
        self.line("{");
        self.line(DECLARATIONS);
        self.start();
        for block in 0..blocks {
            self.multiply("x", block);
            if block > 0 {
                self.wait_for_all_but_one();
            }
            self.advance(block == 0);
        }
        self.line("LOOP:");
        for (scores, finished) in [("y", "x"), ("x", "y")] {
            self.line(&format!(
                "add.u32 t0, key, {TILE_KEYS};\nsetp.ge.u32 flag, t0, {END_KEY};\n@flag bra END_{finished};"
            ));
            for block in 0..blocks {
                self.multiply(scores, block);
                self.wait_for_all_but_one();
                self.advance(false);
                // What the finished tile needs is spread over the products of this one.
                for part in (0..PARTS).filter(|part| part * blocks / PARTS == block) {
                    self.part(finished, part);
                }
            }
        }
        self.line("bra LOOP;");
        for finished in ["x", "y"] {
            self.line(&format!("END_{finished}:\nwgmma.wait_group.sync.aligned 0;"));
            self.release();
            for part in 0..PARTS {
                self.part(finished, part);
            }
            self.line("bra DONE;");
        }
        self.line("DONE:\n@signals cp.async.bulk.wait_group 0;");
        for row in 0..2 {
            for lanes in [1, 2] {
                self.line(&format!(
                    "shfl.sync.bfly.b32 e0, sum{row}, {lanes}, 0x1f, 0xffffffff;\nadd.f32 sum{row}, sum{row}, e0;"
                ));
            }
            self.line(&format!(
                "mov.f32 %{row}, sum{row};\nmov.f32 %{}, reference{row};",
                2 + row
            ));
        }
        self.line("}");
        self.text
    }

    fn start(&mut self) {
        let zero = float(0.0);
        self.line(&format!(
            "setp.ne.u32 signals, {SIGNALS}, 0;\nsetp.ne.u32 never, {SIGNALS}, {SIGNALS};"
        ));
        self.line(&format!(
            "mov.u32 key, {FIRST_KEY};\nmov.f32 sum0, {zero};\nmov.f32 sum1, {zero};"
        ));
        // So low that the first tile raises it.
        for row in 0..2 {
            self.line(&format!(
                "mov.f32 reference{row}, {};\nmov.f32 minus{row}, {};",
                float(MASKED),
                float(-MASKED)
            ));
        }
        self.line(&format!(
            "mov.u32 full, {RING};\nmov.u32 phase, 0;\nmov.u64 slot, {KEYS};"
        ));
    }

    /// Waits for the ring's next slot and starts its products, a group of 4.
    fn multiply(&mut self, scores: &str, block: u32) {
        let wait = self.label();
        let half = self.form.half.name();
        let steps = ROW_CHANNELS / MMA_DEPTH;
        let registers = (0..SCORES)
            .map(|i| format!("{scores}{i}"))
            .collect::<Vec<_>>()
            .join(", ");
        self.line(&format!(
            "WAIT{wait}:\nmbarrier.try_wait.parity.shared::cta.b64 done, [full], phase;\n@!done bra WAIT{wait};"
        ));
        for step in 0..steps {
            let along_k = step * MMA_DEPTH * 2 / 16;
            let query = block * BOX_BYTES / 16 + along_k;
            self.line(&format!(
                "add.u64 query{step}, {QUERIES}, {query};\nadd.u64 keys{step}, slot, {along_k};"
            ));
        }
        self.line("wgmma.fence.sync.aligned;");
        for step in 0..steps {
            // The first product of a tile overwrites what the registers hold.
            let adds = if block == 0 && step == 0 { "never" } else { "1" };
            self.line(&format!(
                "wgmma.mma_async.sync.aligned.m64n128k16.f32.{half}.{half} {{{registers}}}, query{step}, keys{step}, {adds}, 1, 1, 0, 0;"
            ));
        }
        self.line("wgmma.commit_group.sync.aligned;");
    }

    /// The group just started stays in flight; all before it are done.
    fn wait_for_all_but_one(&mut self) {
        self.line("wgmma.wait_group.sync.aligned 1;");
    }

    /// Gives the slot of the last finished group back.
    fn release(&mut self) {
        self.line("@signals mbarrier.arrive.shared::cta.b64 _, [previous_empty];");
    }

    /// Steps to the ring's next slot, and gives back the one before the current, whose products are done.
    fn advance(&mut self, first: bool) {
        if !first {
            self.release();
        }
        let slots = self.form.slots() * BARRIER_BYTES;
        self.line(&format!(
            "add.u32 previous_empty, full, {slots};\nadd.u32 full, full, {BARRIER_BYTES};\n\
             add.u64 slot, slot, {};\nadd.u32 t0, {RING}, {slots};\nsetp.eq.u32 done, full, t0;\n\
             @done mov.u32 full, {RING};\n@done mov.u64 slot, {KEYS};\n@done xor.b32 phase, phase, 1;",
            BOX_BYTES / 16
        ));
    }

    /// One of the [`PARTS`] of what turns finished scores into stored probabilities. The store buffer holds half a tile.
    fn part(&mut self, scores: &str, part: u32) {
        match part {
            0 => self.maxima(scores),
            1 => self.slices(scores, 0..2),
            2 => self.slices(scores, 2..4),
            3 => self.store_half(0),
            4 => {
                self.wait_for_store_buffer();
                self.slices(scores, 4..5);
            }
            5 => self.slices(scores, 5..7),
            6 => {
                self.slices(scores, 7..8);
                self.store_half(1);
            }
            // Leaves the last products of a tile, and their wait for the ring, with nothing beside them.
            _ => {}
        }
    }

    fn slices(&mut self, scores: &str, slices: std::ops::Range<u32>) {
        for slice in slices {
            self.slice(scores, slice);
        }
    }

    /// Probabilities of 16 columns, into sums and the store buffer.
    fn slice(&mut self, scores: &str, slice: u32) {
        let half = self.form.half.name();
        for i in 0..SLICE_SCORES {
            let row = i / 2 % 2;
            self.line(&format!(
                "fma.rn.f32 e{i}, {scores}{}, {}, minus{row};\nex2.approx.ftz.f32 e{i}, e{i};\nadd.f32 sum{row}, sum{row}, e{i};",
                SLICE_SCORES * slice + i,
                float(self.form.scale())
            ));
        }
        for i in 0..4 {
            self.line(&format!("cvt.rn.{half}x2.f32 packed{i}, e{}, e{};", 2 * i + 1, 2 * i));
        }
        // The 16-byte chunk in a swizzled row is `(2 slice + lane / 16) ^ (lane % 8)`: the lane's own XOR twice the slice.
        self.line(&format!(
            "xor.b32 address, {LANE_STORE}, {};\n\
             stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [address], {{packed0, packed1, packed2, packed3}};",
            slice % (SLICES / 2) * 32
        ));
    }

    /// Stores half a tile. `key` has moved on to the next tile already.
    fn store_half(&mut self, half: u32) {
        let back = TILE_KEYS - ROW_CHANNELS * half;
        self.line(&format!(
            "fence.proxy.async.shared::cta;\nbar.sync {GROUP_BARRIER}, {GROUP};\nsub.u32 t0, key, {back};"
        ));
        self.line(&format!(
            "@signals cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{MAP}, {{t0, {WARP_ROW}}}], [{LANE_STORE}];\n\
             @signals cp.async.bulk.commit_group;"
        ));
    }

    fn wait_for_store_buffer(&mut self) {
        self.line(&format!(
            "@signals cp.async.bulk.wait_group.read 0;\nbar.sync {GROUP_BARRIER}, {GROUP};"
        ));
    }

    /// Masks keys that do not exist, takes the rows' maxima, raises references. Then the store buffer is free, too.
    fn maxima(&mut self, scores: &str) {
        let number = self.label();
        self.mask(scores, number);
        for row in 0..2 {
            self.maximum(scores, row);
            // The reference is in powers of two, so the maximum must be.
            self.line(&format!(
                "mul.f32 maximum{row}, maximum{row}, {};\nadd.f32 e{limit}, reference{row}, {};\n\
                 setp.gt.f32 raise{row}, maximum{row}, e{limit};",
                float(self.form.scale()),
                float(self.window.raise),
                limit = 4 + row
            ));
        }
        // One instruction asks the warpgroup whether any row is raised and orders the store buffer's next use.
        self.line(&format!(
            "or.pred flag, raise0, raise1;\n@signals cp.async.bulk.wait_group.read 0;\n\
             bar.red.or.pred flag, {GROUP_BARRIER}, {GROUP}, flag;\n@!flag bra KEEP{number};"
        ));
        for row in 0..2 {
            // e0 and e1 become the factors of the two rows.
            self.line(&format!(
                "cvt.rpi.f32.f32 maximum{row}, maximum{row};\nadd.f32 maximum{row}, maximum{row}, {};\n\
                 @!raise{row} mov.f32 maximum{row}, reference{row};\nsub.f32 e{row}, reference{row}, maximum{row};\n\
                 ex2.approx.ftz.f32 e{row}, e{row};\nmul.f32 sum{row}, sum{row}, e{row};\n\
                 mov.f32 reference{row}, maximum{row};\nneg.f32 minus{row}, maximum{row};",
                float(self.window.above)
            ));
        }
        self.rescale(number);
        self.line(&format!("KEEP{number}:\nadd.u32 key, key, {TILE_KEYS};"));
    }

    /// Only the last tile of all can be ragged; TMA filled it with zeros, whose scores would count.
    fn mask(&mut self, scores: &str, number: u32) {
        self.line(&format!(
            "add.u32 t0, key, {TILE_KEYS};\nsetp.gt.u32 flag, t0, {TOKENS};\n@!flag bra WHOLE{number};"
        ));
        for eight in 0..TILE_KEYS / 8 {
            for odd in 0..2 {
                let (top, bottom) = (4 * eight + odd, 4 * eight + 2 + odd);
                self.line(&format!(
                    "add.u32 t1, key, {};\nadd.u32 t1, t1, {LANE_COLUMN};\nsetp.ge.u32 flag, t1, {TOKENS};\n\
                     @flag mov.f32 {scores}{top}, {masked};\n@flag mov.f32 {scores}{bottom}, {masked};",
                    8 * eight + odd,
                    masked = float(MASKED)
                ));
            }
        }
        self.line(&format!("WHOLE{number}:"));
    }

    /// The largest score of a row, which four lanes share; four independent chains.
    fn maximum(&mut self, scores: &str, row: u32) {
        for chain in 0..4 {
            let first = 4 * chain + 2 * row;
            self.line(&format!("max.f32 e{chain}, {scores}{first}, {scores}{};", first + 1));
        }
        for eight in 4..TILE_KEYS / 8 {
            for odd in 0..2 {
                self.line(&format!(
                    "max.f32 e{0}, e{0}, {scores}{1};",
                    eight % 4,
                    4 * eight + 2 * row + odd
                ));
            }
        }
        self.line(&format!(
            "max.f32 e0, e0, e1;\nmax.f32 e2, e2, e3;\nmax.f32 maximum{row}, e0, e2;"
        ));
        for lanes in [1, 2] {
            self.line(&format!(
                "shfl.sync.bfly.b32 e0, maximum{row}, {lanes}, 0x1f, 0xffffffff;\nmax.f32 maximum{row}, maximum{row}, e0;"
            ));
        }
    }

    /// Scales what this range has stored of the raised rows. Each warp takes its own 16 rows, two at a time.
    fn rescale(&mut self, number: u32) {
        let one = float(1.0);
        // Nothing is stored at the first tile. Later, TMA's stores must be done and visible to plain loads.
        self.line(&format!(
            "sub.u32 t3, key, {FIRST_KEY};\nsetp.eq.u32 flag, t3, 0;\n@flag bra KEEP{number};\n\
             @signals cp.async.bulk.wait_group 0;\nfence.proxy.async;\nbar.sync {GROUP_BARRIER}, {GROUP};\n\
             shr.u32 t3, t3, 1;\nmov.u32 t2, 0;\nmov.u32 t0, %%laneid;"
        ));
        // The factors of rows t2 and t2 + 8 are with the four lanes that own them. Most rows keep their reference.
        self.line(&format!(
            "ROWS{number}:\nshl.b32 t1, t2, 2;\nshfl.sync.idx.b32 e2, e0, t1, 0x1f, 0xffffffff;\n\
             shfl.sync.idx.b32 e3, e1, t1, 0x1f, 0xffffffff;\n\
             setp.eq.f32 flag, e2, {one};\nsetp.eq.and.f32 flag, e3, {one}, flag;\n@flag bra NEXT{number};"
        ));
        self.line(&format!(
            "add.u32 t1, {WARP_ROW}, t2;\nmul.wide.u32 row0, t1, {ROW_LENGTH};\ncvt.u64.u32 row1, {FIRST_KEY};\n\
             add.u64 row0, row0, row1;\nshl.b64 row0, row0, 1;\nadd.u64 row0, row0, {PROBABILITIES};\n\
             mul.wide.u32 row1, {ROW_LENGTH}, 16;\nadd.u64 row1, row1, row0;\nmov.u32 t1, t0;"
        ));
        self.line(&format!(
            "PAIRS{number}:\nsetp.ge.u32 flag, t1, t3;\n@flag bra NEXT{number};\nmul.wide.u32 along, t1, 4;"
        ));
        for (row, factor) in [("row0", "e2"), ("row1", "e3")] {
            let half = self.form.half.name();
            self.line(&format!("add.u64 at, {row}, along;\nld.global.b32 packed0, [at];"));
            self.line(match self.form.half {
                Half::Bf16 => {
                    "shl.b32 packed1, packed0, 16;\nand.b32 packed2, packed0, 0xffff0000;\n\
                     mov.b32 e4, packed1;\nmov.b32 e5, packed2;"
                }
                Half::F16 => {
                    "{\n.reg .b16 low, high;\nmov.b32 {low, high}, packed0;\n\
                     cvt.f32.f16 e4, low;\ncvt.f32.f16 e5, high;\n}"
                }
            });
            self.line(&format!(
                "mul.f32 e4, e4, {factor};\nmul.f32 e5, e5, {factor};\ncvt.rn.{half}x2.f32 packed0, e5, e4;\n\
                 st.global.b32 [at], packed0;"
            ));
        }
        self.line(&format!(
            "add.u32 t1, t1, 32;\nbra PAIRS{number};\nNEXT{number}:\nadd.u32 t2, t2, 1;\nsetp.lt.u32 flag, t2, 8;\n\
             @flag bra ROWS{number};\nfence.proxy.async;"
        ));
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn main_loop<N: Size>(
    queries: u64,
    keys: u64,
    ring: u32,
    signals: u32,
    group_barrier: u32,
    lane_store: u32,
    map: u64,
    first_key: u32,
    end_key: u32,
    tokens: u32,
    probabilities: *mut u32,
    row_length: u32,
    warp_row: u32,
    lane_column: u32,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let body = comptime!(form.main_loop());
    let results: Vector<f32, N>;
    // The comment names every operand, because each must occur; the order here is that of the numbers in the text.
    gpu_asm!(
        "{body} /* {d} {q} {k} {r} {s} {g} {l} {m} {f} {e} {t} {p} {w} {u} {c} */",
        d = out(_) results, q = in(_) u64::cast_from(queries), k = in(_) u64::cast_from(keys), r = in(_) u32::cast_from(ring),
        s = in(_) u32::cast_from(signals), g = in(_) u32::cast_from(group_barrier), l = in(_) u32::cast_from(lane_store),
        m = in(_) u64::cast_from(map), f = in(_) u32::cast_from(first_key), e = in(_) u32::cast_from(end_key),
        t = in(_) u32::cast_from(tokens), p = in(_) probabilities, w = in(_) u32::cast_from(row_length),
        u = in(_) u32::cast_from(warp_row), c = in(_) u32::cast_from(lane_column),
    );
    results
}

/// Cube `range * blocks + block`. `probabilities` and `stored` are the same `[chunk_rows, padded_tokens]`, as pairs and as a
/// tensor map; `sums` and `references` are `[ranges, chunk_rows]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn attention_scores_kernel<E: Float, N: Size>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    stored: &TensorMap<E, Tiled>,
    probabilities: &mut [u32],
    sums: &mut [f32],
    references: &mut [f32],
    work: Work,
    #[comptime] form: Form,
    #[define(E)] _dtype: ElemType,
) {
    let shared = Shared::<[u64]>::new_aligned_slice(comptime!(form.shared_bytes() as usize / 8), 1024usize);
    let base = unsafe { generic_to_shared::<u64>(shared.as_slice().as_ptr_unchecked()) };
    let keys_full = base + comptime!(form.keys_full());
    let keys_empty = base + comptime!(form.keys_empty());
    let queries_full = base + comptime!(form.queries_full());
    let slots = comptime!(form.slots());
    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..slots {
            barrier_init(keys_full + comptime!(i * BARRIER_BYTES), 1u32);
            barrier_init(keys_empty + comptime!(i * BARRIER_BYTES), 2u32);
        }
        barrier_init(queries_full, 1u32);
        barrier_init_fence();
    }
    sync_cube();

    let block = CUBE_POS_X % work.blocks;
    let range = CUBE_POS_X / work.blocks;
    let tiles = key_tiles(&work, range);
    if UNIT_POS < LOADER {
        let group = UNIT_POS / GROUP;
        let unit = UNIT_POS % GROUP;
        let warp = unit / 32;
        let lane = unit % 32;
        let store = base + comptime!(form.stores_at()) + group * STORE_BYTES;
        let matrix_row = lane % 8;
        let lane_store =
            store + (warp * 16 + matrix_row + ((lane / 8) % 2) * 8) * ROW_BYTES + ((lane / 16) ^ matrix_row) * 16;
        let warp_row = block * BLOCK + group * GROUP_ROWS + warp * 16;
        let pointer = unsafe { probabilities.as_mut_ptr_unchecked() };
        barrier_wait(queries_full, 0u32);
        let results = main_loop::<N>(
            descriptor(base + group * GROUP_BYTES),
            descriptor(base + comptime!(form.keys_at())),
            keys_full,
            u32::cast_from(unit == 0),
            group + 1,
            lane_store,
            tensor_map_address(stored),
            tiles.first * TILE_KEYS,
            (tiles.first + tiles.count) * TILE_KEYS,
            work.tokens,
            pointer,
            work.padded_tokens,
            warp_row,
            (lane % 4) * 2,
            form,
        );
        if lane % 4 == 0 {
            let at = (range * work.chunk_rows + warp_row + lane / 4) as usize;
            sums[at] = results.extract(0usize);
            sums[at + 8] = results.extract(1usize);
            references[at] = results.extract(2usize);
            references[at + 8] = results.extract(3usize);
        }
    } else if UNIT_POS == LOADER {
        let query_map = tensor_map_address(query);
        let key_map = tensor_map_address(key);
        barrier_expect(queries_full, comptime!(form.query_bytes()));
        for i in 0..comptime!(form.blocks()) {
            let column = i32::cast_from(i * ROW_CHANNELS);
            tma_load_2d(
                base + i * BOX_BYTES,
                query_map,
                column,
                i32::cast_from(block * BLOCK),
                queries_full,
            );
        }
        let mut slot = 0u32;
        let mut phase = 1u32;
        for tile in 0..tiles.count {
            for i in 0..comptime!(form.blocks()) {
                let full = keys_full + slot * BARRIER_BYTES;
                barrier_wait(keys_empty + slot * BARRIER_BYTES, phase);
                barrier_expect(full, BOX_BYTES);
                tma_load_2d(
                    base + comptime!(form.keys_at()) + slot * BOX_BYTES,
                    key_map,
                    i32::cast_from(i * ROW_CHANNELS),
                    i32::cast_from((tiles.first + tile) * TILE_KEYS),
                    full,
                );
                slot += 1;
                if slot == slots {
                    slot = 0u32;
                    phase = phase ^ 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn forms() -> impl Iterator<Item = Form> {
        [Half::Bf16, Half::F16]
            .into_iter()
            .flat_map(|half| (64..=512).step_by(64).map(move |channels| Form { half, channels }))
    }

    #[test]
    fn the_ring_beside_512_channels_has_5_slots_and_shared_memory_holds_every_form() {
        let widest = Form {
            half: Half::Bf16,
            channels: 512,
        };
        assert_eq!(widest.slots(), 5);
        for form in forms() {
            assert!(form.shared_bytes() <= 232_448, "{form:?}");
            assert!(form.slots() >= 5, "{form:?}");
            assert!(form.queries_full() + BARRIER_BYTES <= form.shared_bytes(), "{form:?}");
            // Swizzled boxes start at multiples of 1024.
            assert_eq!(form.keys_at() % 1024 + form.stores_at() % 1024, 0, "{form:?}");
        }
    }

    #[test]
    fn every_tile_multiplies_all_channels_and_stores_both_halves() {
        for form in forms() {
            let text = form.main_loop();
            let count = |what: &str| text.matches(what).count() as u32;
            // One tile ahead of the loop and two in it, 4 products to a block.
            assert_eq!(count("wgmma.mma_async"), 3 * 4 * form.channels / 64, "{form:?}");
            assert_eq!(
                count(".f32.bf16.bf16") + count(".f32.f16.f16"),
                count("wgmma.mma_async")
            );
            // Two tiles in the loop and two ends.
            assert_eq!(count("stmatrix"), 4 * 8);
            assert_eq!(count("cp.async.bulk.tensor"), 4 * 2);
            assert_eq!(count("bar.red.or.pred"), 4);
            // Each slot taken is given back.
            assert_eq!(count("[previous_empty]"), count("WAIT") / 2 - 1 + 2, "{form:?}");
        }
    }

    #[test]
    fn the_steps_of_512_channels_leave_the_last_block_of_products_alone() {
        let text = Form {
            half: Half::Bf16,
            channels: 512,
        }
        .main_loop();
        let body = text.split("LOOP:").nth(1).unwrap().split("END_x:").next().unwrap();
        let blocks: Vec<_> = body.split("wgmma.commit_group").skip(1).collect();
        assert_eq!(blocks.len(), 16);
        let slices: Vec<_> = blocks.iter().map(|block| block.matches("stmatrix").count()).collect();
        assert_eq!(slices, [0, 2, 2, 0, 1, 2, 1, 0, 0, 2, 2, 0, 1, 2, 1, 0]);
        let stores: Vec<_> = blocks
            .iter()
            .map(|block| block.matches("cp.async.bulk.tensor").count())
            .collect();
        assert_eq!(stores, [0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0]);
    }

    #[test]
    fn braces_balance_and_labels_are_unique_and_defined() {
        for form in forms() {
            let text = form.main_loop();
            assert_eq!(text.matches('{').count(), text.matches('}').count());
            let labels: Vec<_> = text.lines().filter_map(|line| line.strip_suffix(':')).collect();
            let unique: HashSet<_> = labels.iter().collect();
            assert_eq!(labels.len(), unique.len());
            for line in text.lines() {
                if let Some((_, target)) = line.split_once("bra ") {
                    assert!(unique.contains(&target.trim_end_matches(';')), "{line}");
                }
            }
        }
    }

    #[test]
    fn windows_fit_the_range_of_their_types() {
        // 2^16 keys at the window's end sum to less than f32's largest; the stored ones fit their own type.
        for (half, largest) in [(Half::Bf16, 127.0 - 16.0), (Half::F16, 15.0)] {
            let window = Window::of(half);
            assert!(window.raise <= largest && -window.above < window.raise);
        }
    }
}

//! Attention of one wide head, exact, as two products over chunks of the queries.
//!
//! Probabilities go through memory, in 16 bits and for a bounded chunk of queries at a time: an output tile of 128 queries by
//! 512 channels alone would fill the register file, and two plain products leave it to the accumulators. Three kernels a
//! chunk: [`scores`], [`mix`], [`merge`]. Keys are cut into ranges, so that few queries occupy all multiprocessors, too.

mod merge;
mod mix;
mod scores;

use cubecl::{prelude::*, server::Handle};

use self::{merge::attention_merge_kernel, mix::attention_mix_kernel, scores::attention_scores_kernel};
use super::{
    ptx::{Half, ROW_CHANNELS},
    tensor_map,
};
use crate::gpu::{gemm::Operand, launch::buffer};

/// Rows of queries that a cube computes, and of keys in a tile.
const BLOCK: u32 = 128;
/// Units of a warpgroup, and rows that it computes.
const GROUP: u32 = 128;
const GROUP_ROWS: u32 = 64;
/// Two multiplying warpgroups and a loading warp.
const LOADER: u32 = 2 * GROUP;
const UNITS: u32 = LOADER + 32;
/// The score of a key that does not exist. Finite, so that no difference of two is NaN.
const MASKED: f32 = -1e30;

const MOST_CHANNELS: usize = 512;
/// Bytes of scratch of one attention, wherever a smaller chunk still fits.
const SCRATCH_BYTES: usize = 256 << 20;

/// Sizes at run time.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
struct Work {
    /// Number of keys.
    tokens: u32,
    /// Blocks of queries in this chunk.
    blocks: u32,
    /// Ranges of keys.
    ranges: u32,
    /// Rows of a whole chunk, which is what the buffers hold.
    chunk_rows: u32,
    /// Elements of a row of probabilities.
    padded_tokens: u32,
}

/// The tiles of a range of keys.
#[derive(CubeType, Clone, Copy)]
struct KeyTiles {
    first: u32,
    count: u32,
}

#[cube]
fn key_tiles(work: &Work, range: u32) -> KeyTiles {
    let tiles = work.tokens.div_ceil(BLOCK);
    let first = range * tiles / work.ranges;
    KeyTiles {
        first,
        count: (range + 1) * tiles / work.ranges - first,
    }
}

/// How the work is cut: chunks of `blocks` blocks of queries, each with `ranges` ranges of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    tokens: usize,
    channels: usize,
    blocks: usize,
    ranges: usize,
}

impl Plan {
    /// The cut that takes least time by a simple measure, with one cube at most for each multiprocessor.
    fn new(tokens: usize, channels: usize, multiprocessors: usize) -> Self {
        let tiles = tokens.div_ceil(BLOCK as usize);
        let multiprocessors = multiprocessors.max(1);
        let plan = |ranges: usize| Self {
            tokens,
            channels,
            blocks: tiles.min(multiprocessors / ranges),
            ranges,
        };
        // A chunk's kernels start and end in about the time of 4 tiles of keys.
        let cost = |plan: &Self| plan.chunks() * (tiles.div_ceil(plan.ranges) + 4);
        let smallest = Self { blocks: 1, ..plan(1) };
        (1..=tiles.min(multiprocessors))
            .map(plan)
            .filter(|plan| plan.scratch_bytes() <= SCRATCH_BYTES)
            .min_by_key(cost)
            .unwrap_or(smallest)
    }

    /// Rows of queries in a chunk.
    fn chunk_rows(&self) -> usize {
        self.blocks * BLOCK as usize
    }
    fn chunks(&self) -> usize {
        self.tokens.div_ceil(self.chunk_rows())
    }
    /// Elements of a row of probabilities: whole tiles.
    fn padded_tokens(&self) -> usize {
        self.tokens.next_multiple_of(BLOCK as usize)
    }
    /// Elements of the probabilities, and rows of the partial results.
    fn probabilities(&self) -> usize {
        self.chunk_rows() * self.padded_tokens()
    }
    fn partial_rows(&self) -> usize {
        self.ranges * self.chunk_rows()
    }
    fn scratch_bytes(&self) -> usize {
        let partial_row = (self.channels + 2) * size_of::<f32>();
        self.probabilities() * size_of::<u16>() + self.partial_rows() * partial_row
    }
}

/// `softmax(query key^T / sqrt(channels)) value + bias + residual`, rounded once.
///
/// Operands are rows of `channels` of 16 bits, one for each token. Queries, keys and values may be columns of one buffer:
/// their offsets and strides must be multiples of 8 elements, as TMA wants them, those of the others of 4.
pub(in crate::gpu) struct HopperAttention<'a> {
    pub dtype: ElemType,
    pub half: Half,
    pub tokens: usize,
    /// A multiple of 64, at most 512.
    pub channels: usize,
    pub query: Operand<'a>,
    pub key: Operand<'a>,
    pub value: Operand<'a>,
    /// f32.
    pub bias: &'a Handle,
    pub residual: Operand<'a>,
    pub out: Operand<'a>,
    pub multiprocessors: u32,
}

impl HopperAttention<'_> {
    /// Enqueues the kernels.
    pub fn launch(self, client: &Client) {
        debug_assert!(self.channels.is_multiple_of(ROW_CHANNELS as usize) && self.channels <= MOST_CHANNELS);
        let plan = Plan::new(self.tokens, self.channels, self.multiprocessors as usize);
        let (chunk_rows, padded_tokens) = (plan.chunk_rows(), plan.padded_tokens());
        let partial_rows = plan.partial_rows();
        let probabilities = client.empty(plan.probabilities() * size_of::<u16>());
        let partials = client.empty(partial_rows * self.channels * size_of::<f32>());
        let sums = client.empty(partial_rows * size_of::<f32>());
        let references = client.empty(partial_rows * size_of::<f32>());

        let channels = self.channels as u32;
        let scores_form = scores::Form {
            half: self.half,
            channels,
        };
        let mix_form = mix::Form {
            half: self.half,
            channels,
        };
        let chunk_of_probabilities = Operand::packed(&probabilities, padded_tokens);
        for first in (0..self.tokens).step_by(chunk_rows) {
            let rows = chunk_rows.min(self.tokens - first);
            let blocks = rows.div_ceil(BLOCK as usize);
            let work = || {
                WorkLaunch::new(
                    self.tokens as u32,
                    blocks as u32,
                    plan.ranges as u32,
                    chunk_rows as u32,
                    padded_tokens as u32,
                )
            };
            let from_first = |operand: Operand<'_>| operand.offset + first * operand.stride;
            let query = Operand {
                offset: from_first(self.query),
                ..self.query
            };
            let query = self.map(query, rows, self.channels, BLOCK);
            let key = self.map(self.key, self.tokens, self.channels, BLOCK);
            let value = self.map(self.value, self.tokens, self.channels, ROW_CHANNELS);
            let stored = self.map(chunk_of_probabilities, chunk_rows, padded_tokens, GROUP_ROWS);
            let mixed = self.map(chunk_of_probabilities, chunk_rows, padded_tokens, BLOCK);
            let cubes = blocks * plan.ranges;
            // Safety: TMA checks coordinates. Addresses made by hand lie in the rows of this chunk's blocks and in the
            // tiles of keys, which the buffers were made for.
            unsafe {
                attention_scores_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(cubes as u32, 1, 1),
                    CubeDim::new_1d(UNITS),
                    scores::RESULTS,
                    query,
                    key,
                    stored,
                    buffer(&probabilities, plan.probabilities() / 2),
                    buffer(&sums, partial_rows),
                    buffer(&references, partial_rows),
                    work(),
                    scores_form,
                    self.dtype,
                );
                attention_mix_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(
                        (cubes as u32 * mix_form.column_tiles()).min(self.multiprocessors.max(1)),
                        1,
                        1,
                    ),
                    CubeDim::new_1d(UNITS),
                    mix_form.sums_length(),
                    mixed,
                    value,
                    buffer(&partials, partial_rows * self.channels),
                    work(),
                    mix_form,
                    self.dtype,
                );
            }

            let vector = merge::VECTOR as usize;
            let row_vectors = self.channels / vector;
            let size = self.dtype.size();
            let rows_of = |operand: Operand<'_>| {
                let handle = operand.handle.clone().offset_start((from_first(operand) * size) as u64);
                let length = ((rows - 1) * operand.stride + self.channels) / vector;
                // Safety: the caller's rows.
                (unsafe { BufferArg::from_raw_parts(handle, length) }, length)
            };
            let (residual, residual_length) = rows_of(self.residual);
            let (out, out_length) = rows_of(self.out);
            let longest = (partial_rows * row_vectors).max(residual_length).max(out_length);
            // Safety: the kernel keeps below `rows`, and the buffers hold as many.
            unsafe {
                attention_merge_kernel::launch_unchecked(
                    client,
                    CubeCount::Static((rows * row_vectors).div_ceil(merge::UNITS as usize) as u32, 1, 1),
                    CubeDim::new_1d(merge::UNITS),
                    AddressType::from_len(longest),
                    vector,
                    buffer(&partials, partial_rows * row_vectors),
                    buffer(&sums, partial_rows),
                    buffer(&references, partial_rows),
                    buffer(self.bias, row_vectors),
                    residual,
                    out,
                    rows as u32,
                    chunk_rows as u32,
                    plan.ranges as u32,
                    (self.residual.stride / vector) as u32,
                    (self.out.stride / vector) as u32,
                    row_vectors as u32,
                    self.dtype,
                );
            }
        }
    }

    /// The map of boxes of `box_rows` by [`ROW_CHANNELS`]. What lies outside of `rows` and `columns` reads as zero.
    fn map(&self, operand: Operand<'_>, rows: usize, columns: usize, box_rows: u32) -> TensorMapArg<Tiled> {
        let handle = operand
            .handle
            .clone()
            .offset_start((operand.offset * self.dtype.size()) as u64);
        let tile = [box_rows as usize, ROW_CHANNELS as usize];
        // Safety: shape and strides are those of the buffer.
        unsafe { tensor_map(handle, self.dtype, &tile, &[operand.stride, 1], &[rows, columns]) }
            .with_prefetch(TensorMapPrefetch::B256)
    }
}

/// Every form of the kernels, as CUDA C++.
#[cfg(test)]
pub(in crate::gpu) fn emit_all() {
    use crate::gpu::emit::{device_properties, emit, settings, target_properties};
    use cubecl::ir::FloatKind;

    let argument = || BufferCompilationArg { inplace: None };
    let work = || WorkCompilationArg {
        tokens: (),
        blocks: (),
        ranges: (),
        chunk_rows: (),
        padded_tokens: (),
    };
    for (half, float) in [(Half::Bf16, FloatKind::BF16), (Half::F16, FloatKind::F16)] {
        let dtype = ElemType::Float(float);
        for channels in (ROW_CHANNELS..=MOST_CHANNELS as u32).step_by(ROW_CHANNELS as usize) {
            let name = |kernel: &str| format!("attention_{kernel}_{}_{channels}", half.name());
            let scores = attention_scores_kernel::AttentionScoresKernel::new(
                settings(CubeDim::new_1d(UNITS)),
                device_properties(),
                target_properties(),
                (),
                (),
                (),
                argument(),
                argument(),
                argument(),
                work(),
                scores::RESULTS,
                scores::Form { half, channels },
                dtype,
            );
            emit(&name("scores"), &scores);
            let form = mix::Form { half, channels };
            let mix = attention_mix_kernel::AttentionMixKernel::new(
                settings(CubeDim::new_1d(UNITS)),
                device_properties(),
                target_properties(),
                (),
                (),
                argument(),
                work(),
                form.sums_length(),
                form,
                dtype,
            );
            emit(&name("mix"), &mix);
            let merge = attention_merge_kernel::AttentionMergeKernel::new(
                settings(CubeDim::new_1d(merge::UNITS)),
                device_properties(),
                target_properties(),
                argument(),
                argument(),
                argument(),
                argument(),
                argument(),
                argument(),
                (),
                (),
                (),
                (),
                (),
                merge::VECTOR as usize,
                channels / merge::VECTOR,
                dtype,
            );
            emit(&name("merge"), &merge);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: [usize; 7] = [1, 35, 128, 129, 4096, 16_384, 65_536];

    #[test]
    fn plans_cover_all_rows_and_keys_within_device_and_memory() {
        for tokens in TOKENS {
            for multiprocessors in [132, 78, 1] {
                for channels in [64, 384, 512] {
                    let plan = Plan::new(tokens, channels, multiprocessors);
                    let tiles = tokens.div_ceil(128);
                    assert!(plan.blocks >= 1 && plan.ranges >= 1, "{plan:?}");
                    assert!(plan.blocks * plan.ranges <= multiprocessors, "{plan:?}");
                    assert!(plan.chunks() * plan.blocks >= tiles, "{plan:?}");
                    assert!((plan.chunks() - 1) * plan.blocks < tiles, "{plan:?}");
                    // Every range has a tile, or its rows would have no reference.
                    assert!(plan.ranges <= tiles, "{plan:?}");
                    assert!(plan.padded_tokens() >= tokens && plan.padded_tokens() % 128 == 0);
                    assert!(plan.scratch_bytes() <= 256 << 20, "{plan:?}");
                }
            }
        }
    }

    #[test]
    fn an_h200_is_cut_as_measured_best() {
        let cut = |tokens| {
            let plan = Plan::new(tokens, 512, 132);
            (plan.blocks, plan.ranges)
        };
        assert_eq!(cut(4097), (33, 4));
        assert_eq!(cut(16_384), (44, 3));
        assert_eq!(cut(65_536), (12, 11));
    }

    #[test]
    fn a_plan_exists_where_no_chunk_fits_the_memory() {
        let plan = Plan::new(4 << 20, 512, 132);
        assert_eq!((plan.blocks, plan.ranges), (1, 1));
    }
}

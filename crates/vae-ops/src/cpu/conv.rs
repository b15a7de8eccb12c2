//! Convolutions of channels-last images: strips of tiles in parallel, each a transform, products and a transform back.

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::{Zeroable, zeroed_vec};
use macerator::{Scalar, Simd, WithSimd};
use rayon::prelude::*;

use super::Element;
use super::gemm::{Multiply, RightLayout, row_groups};
use super::method::{Direct, Method, Taps, Upsample, Winograd};
use super::simd::{Isa, LINE, Line, floats_mut, lines, vectors, vectors_mut};
use crate::fused::ConvKind;

/// Weights for each pair of channels, before anything is folded.
fn taps(kind: ConvKind) -> usize {
    match kind {
        ConvKind::Point => 1,
        ConvKind::Square | ConvKind::Upsample => 9,
    }
}

/// Output channels that are computed together, in lines: their products stay in the L2 cache.
const CHANNELS_OUT: usize = 8;

/// Input channels that are transformed together, in lines: their patch stays in the L1 cache.
const CHANNELS_IN: usize = 8;

/// The weights of a convolution, laid out for this processor; as large as they were, but for padding.
#[derive(Clone, Debug)]
pub struct ConvWeights {
    kind: ConvKind,
    channels_out: usize,
    channels_in: usize,
    isa: Isa,
    /// For each [`CHANNELS_OUT`]: [`RightLayout`] with rows `[tap][channels_in]`, channels padded with zeros.
    data: Vec<Line>,
}

impl ConvWeights {
    /// Lays out `weight`, `[channels_out, channels_in, 3, 3]` or, for 1x1, `[channels_out, channels_in, 1, 1]`.
    ///
    /// # Panics
    /// If the length of `weight` does not fit, or there are no channels.
    pub fn pack(kind: ConvKind, weight: &[f32], channels_out: usize, channels_in: usize) -> Self {
        Self::pack_for(Isa::detect(), kind, weight, channels_out, channels_in)
    }

    pub(super) fn pack_for(isa: Isa, kind: ConvKind, weight: &[f32], channels_out: usize, channels_in: usize) -> Self {
        let taps = taps(kind);
        assert!(
            channels_in > 0 && channels_out > 0,
            "a convolution of {channels_in} to {channels_out} channels"
        );
        assert_eq!(
            Some(weight.len()),
            channels_out
                .checked_mul(channels_in)
                .and_then(|pairs| pairs.checked_mul(taps)),
            "weights of {channels_in} to {channels_out} channels with {taps} taps"
        );
        let lanes = isa.lanes();
        let depth = taps * lines(channels_in) * LINE;
        let mut data = zeroed_vec::<Line>(depth * lines(channels_out));
        let chunks = data
            .par_chunks_mut(depth * CHANNELS_OUT)
            .zip(weight.par_chunks(CHANNELS_OUT * LINE * channels_in * taps));
        chunks.for_each(|(data, weight)| {
            let layout = RightLayout {
                depth,
                columns: data.len() / depth * (LINE / lanes),
            };
            let data = floats_mut(data);
            for (out, weight) in weight.chunks_exact(channels_in * taps).enumerate() {
                for (channel, weight) in weight.chunks_exact(taps).enumerate() {
                    for (tap, &weight) in weight.iter().enumerate() {
                        let k = tap * lines(channels_in) * LINE + channel;
                        data[layout.position(k, out / lanes) * lanes + out % lanes] = weight;
                    }
                }
            }
        });
        Self {
            kind,
            channels_out,
            channels_in,
            isa,
            data,
        }
    }

    /// What the convolution does.
    pub fn kind(&self) -> ConvKind {
        self.kind
    }

    /// Channels of the output.
    pub fn channels_out(&self) -> usize {
        self.channels_out
    }

    /// The weights of a method's products, in place of the taps: for each [`CHANNELS_OUT`], for each product,
    /// [`RightLayout`].
    fn transform<M: Method>(&self) -> Vec<Line> {
        let depth = lines(self.channels_in) * LINE;
        let mut data = zeroed_vec::<Line>(depth * lines(self.channels_out) * M::PRODUCTS);
        let pieces = data
            .par_chunks_mut(depth * CHANNELS_OUT * M::PRODUCTS)
            .zip(self.data.par_chunks(depth * CHANNELS_OUT * taps(self.kind)));
        pieces.for_each(|(to, taps)| {
            self.isa.run(TransformWeights::<M> {
                depth,
                taps,
                to,
                method: PhantomData,
            })
        });
        data
    }
}

struct TransformWeights<'a, M> {
    depth: usize,
    taps: &'a [Line],
    to: &'a mut [Line],
    method: PhantomData<M>,
}

impl<M: Method> WithSimd for TransformWeights<'_, M> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self) {
        let depth = self.depth;
        let (taps, to) = (vectors::<S>(self.taps), vectors_mut::<S>(self.to));
        let columns = taps.len() / (9 * depth);
        let taps_layout = RightLayout {
            depth: 9 * depth,
            columns,
        };
        let layout = RightLayout { depth, columns };
        for k in 0..depth {
            for column in 0..columns {
                let mut values: Taps<S> = [[0f32.splat::<S>(); 3]; 3];
                for y in 0..3 {
                    for x in 0..3 {
                        values[y][x] = taps[taps_layout.position((y * 3 + x) * depth + k, column)];
                    }
                }
                M::transform_weights(values, &mut to[layout.position(k, column)..], layout.len());
            }
        }
    }
}

/// Convolves channels-last images: `y = conv(x) + bias + residual`, in `f32`, rounded once.
///
/// - `x`: `[batch, height, width, channels_in]`; the `halo` rows above and below are read as neighbours of the others, what
///   lies further out is zero
/// - `bias`: `[channels_out]`
/// - `y` and `residual`: `[batch, height without halo, width, channels_out]`, twice as high and wide for
///   [`ConvKind::Upsample`]
///
/// The bits do not depend on the number of threads. While it runs it takes, with 512 channels, up to 6 MiB a thread, and 36 MiB
/// for what takes the place of 3x3 weights.
///
/// # Panics
/// If a length does not fit.
pub fn conv<E: Element>(
    weights: &ConvWeights,
    bias: &[f32],
    [batch, rows, width]: [usize; 3],
    halo: [usize; 2],
    x: &[E],
    residual: Option<&[E]>,
    y: &mut [E],
) {
    assert!(halo[0] + halo[1] < rows, "{rows} rows with {halo:?} for the halo");
    let height = rows - halo[0] - halo[1];
    let scale = weights.kind.phases();
    let length = |scale: usize, height: usize, channels: usize| {
        [batch, scale, height, scale, width, channels]
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
    };
    let length_out = length(scale, height, weights.channels_out);
    let length_in = length(1, rows, weights.channels_in);
    assert_eq!(Some(x.len()), length_in, "length of the input");
    assert_eq!(Some(y.len()), length_out, "length of the output");
    assert!(
        residual.is_none_or(|residual| Some(residual.len()) == length_out),
        "length of the residual"
    );
    assert_eq!(bias.len(), weights.channels_out, "length of the bias");
    if y.is_empty() {
        return;
    }
    let bias = padded(bias);
    let image = Images {
        batch,
        height,
        width,
        halo,
        x,
        residual,
        bias: &bias,
        weights,
    };
    match weights.kind {
        ConvKind::Point => image.convolve::<Direct<1>>(&weights.data, y),
        ConvKind::Square if image.winograd_pays() => image.convolve::<Winograd>(&weights.transform::<Winograd>(), y),
        ConvKind::Square => image.convolve::<Direct<3>>(&weights.data, y),
        ConvKind::Upsample => image.convolve::<Upsample>(&weights.transform::<Upsample>(), y),
    }
}

/// What all strips share.
struct Images<'a, E> {
    batch: usize,
    /// Without the halo.
    height: usize,
    width: usize,
    /// Rows of `x` above and below.
    halo: [usize; 2],
    x: &'a [E],
    residual: Option<&'a [E]>,
    bias: &'a [Line],
    weights: &'a ConvWeights,
}

/// Rows of tiles of one image, and the rows of pixels that they give.
struct Strip<'a, E> {
    image: usize,
    tile_rows: Range<usize>,
    first_row: usize,
    y: &'a mut [E],
}

/// Scratch memory of a thread.
struct Scratch {
    /// A patch: `[pixel][channels in]`.
    patch: Vec<Line>,
    /// For each transformed input the left side of a product.
    left: Vec<Line>,
    /// `[product][tile][channels out]`.
    products: Vec<Line>,
    /// A tile: `[pixel][channels out]`.
    tile: Vec<Line>,
}

impl<E: Element> Images<'_, E> {
    /// Height and width of the output.
    fn size_out(&self) -> [usize; 2] {
        [self.height, self.width].map(|size| size * self.weights.kind.phases())
    }

    /// Tiles in each direction.
    fn tiles<M: Method>(&self) -> [usize; 2] {
        self.size_out().map(|size| (size + M::TILE_MARGIN).div_ceil(M::TILE))
    }

    /// Whether transforming the weights is made up for by the products that it saves.
    fn winograd_pays(&self) -> bool {
        // In products for each pair of channels, measured with 512 channels, where the choice costs most.
        const TRANSFORM: usize = 8000;
        let [height, width] = self.size_out();
        let [tiles_y, tiles_x] = self.tiles::<Winograd>();
        let products = Winograd::PRODUCTS * tiles_y * tiles_x;
        9 * self.batch * height * width > self.batch * products + TRANSFORM
    }

    fn convolve<M: Method>(&self, right: &[Line], y: &mut [E]) {
        let [tiles_y, tiles_x] = self.tiles::<M>();
        // A block of tiles or more in each strip, and the same number of strips for each thread.
        let strips = tiles_y
            .div_ceil(M::TILES.div_ceil(tiles_x))
            .next_multiple_of(rayon::current_num_threads())
            .min(tiles_y);
        let strips = self.strips::<M>(strips, y);

        let most_tiles = strips
            .iter()
            .map(|strip| strip.tile_rows.len())
            .max()
            .unwrap_or(0)
            .saturating_mul(tiles_x);
        let depth_lines = M::TAPS * lines(self.weights.channels_in);
        let scratch = || Scratch {
            patch: zeroed_vec(M::PATCH * M::PATCH * CHANNELS_IN),
            left: zeroed_vec(M::INPUTS * most_tiles.min(M::TILES) * depth_lines),
            products: zeroed_vec(M::PRODUCTS * most_tiles.min(M::TILES) * CHANNELS_OUT),
            tile: zeroed_vec(M::TILE * M::TILE * CHANNELS_OUT),
        };
        strips.into_par_iter().for_each_init(scratch, |scratch, mut strip| {
            let first = strip.tile_rows.start * tiles_x;
            let tiles = strip.tile_rows.len() * tiles_x;
            let blocks = tiles.div_ceil(M::TILES);
            for block in 0..blocks {
                let tiles = first + block * tiles / blocks..first + (block + 1) * tiles / blocks;
                self.block::<M>(tiles, right, scratch, &mut strip);
            }
        });
    }

    /// Cuts the output.
    fn strips<'a, M: Method>(&self, strips: usize, y: &'a mut [E]) -> Vec<Strip<'a, E>> {
        let [height_out, width_out] = self.size_out();
        let [tiles_y, _] = self.tiles::<M>();
        let mut rest = y;
        let mut cut = Vec::with_capacity(self.batch * strips);
        for image in 0..self.batch {
            let mut first_row = 0;
            for strip in 0..strips {
                let tile_rows = strip * tiles_y / strips..(strip + 1) * tiles_y / strips;
                let end_row = (tile_rows.end * M::TILE - M::TILE_MARGIN).min(height_out);
                let y;
                (y, rest) = rest.split_at_mut((end_row - first_row) * width_out * self.weights.channels_out);
                cut.push(Strip {
                    image,
                    tile_rows,
                    first_row,
                    y,
                });
                first_row = end_row;
            }
        }
        cut
    }

    /// Some tiles of a strip, counted over the image row by row.
    fn block<M: Method>(&self, tiles: Range<usize>, right: &[Line], scratch: &mut Scratch, strip: &mut Strip<'_, E>) {
        let ConvWeights {
            channels_in,
            channels_out,
            isa,
            ..
        } = *self.weights;
        let lanes = isa.lanes();
        let Scratch {
            patch,
            left,
            products,
            tile,
        } = scratch;
        let left_lines = tiles.len() * M::TAPS * lines(channels_in);

        for (row, rows) in row_groups(lanes, tiles.len()) {
            for member in 0..rows {
                for line in (0..lines(channels_in)).step_by(CHANNELS_IN) {
                    let channel_lines = (lines(channels_in) - line).min(CHANNELS_IN);
                    self.gather::<M>(strip.image, tiles.start + row + member, line, channel_lines, patch);
                    isa.run(TransformInput::<M> {
                        patch,
                        channel_lines,
                        left: &mut left[row * M::TAPS * lines(channels_in) + line * rows + member..],
                        rows,
                        step: if M::INPUTS == 1 {
                            lines(channels_in) * rows
                        } else {
                            left_lines
                        },
                        method: PhantomData,
                    });
                }
            }
        }

        for line in (0..lines(channels_out)).step_by(CHANNELS_OUT) {
            let channel_lines = (lines(channels_out) - line).min(CHANNELS_OUT);
            let layout = RightLayout {
                depth: M::TAPS * lines(channels_in) * LINE,
                columns: channel_lines * (LINE / lanes),
            };
            let right = &right[M::PRODUCTS * layout.depth * line..];
            let step = tiles.len() * channel_lines;
            for product in 0..M::PRODUCTS {
                isa.run(Multiply {
                    rows: tiles.len(),
                    left: &left[M::input_of(product) * left_lines..][..left_lines],
                    right: &right[product * layout.depth * channel_lines..],
                    layout,
                    out: &mut products[product * step..][..step],
                });
            }
            for (index, tile_index) in tiles.clone().enumerate() {
                self.scatter::<M>(strip, tile_index, line, channel_lines, tile, |tile| {
                    isa.run(TransformOutput::<M> {
                        products: &products[index * channel_lines..],
                        step,
                        bias: &self.bias[line..][..channel_lines],
                        tile,
                        method: PhantomData,
                    });
                });
            }
        }
    }

    /// Copies the patch of a tile for some lines of channels, zero outside the image.
    fn gather<M: Method>(&self, image: usize, tile: usize, line: usize, channel_lines: usize, patch: &mut [Line]) {
        let (width, channels) = (self.width, self.weights.channels_in);
        let [above, below] = self.halo;
        let rows = above + self.height + below;
        let [_, tiles_x] = self.tiles::<M>();
        let first = line * LINE;
        let count = (channels - first).min(channel_lines * LINE);
        // Coordinates are one higher than in the image so that none is negative.
        let [top, start] = [tile / tiles_x, tile % tiles_x].map(|tile| tile * M::STEP + 1 - M::MARGIN);
        let patch = floats_mut(&mut patch[..M::PATCH * M::PATCH * channel_lines]);
        for (pixel, patch) in patch.chunks_exact_mut(channel_lines * LINE).enumerate() {
            let (y, x) = (above + top + pixel / M::PATCH, start + pixel % M::PATCH);
            if (1..=rows).contains(&y) && (1..=width).contains(&x) {
                let position = (((image * rows + y - 1) * width + x - 1) * channels) + first;
                E::widen(&self.x[position..][..count], &mut patch[..count]);
                patch[count..].fill(0.0);
            } else {
                patch.fill(0.0);
            }
        }
    }

    /// Fills a tile with the residual or zeros, lets `add` add to it, and rounds what lies in the image into the strip.
    fn scatter<M: Method>(
        &self,
        strip: &mut Strip<'_, E>,
        tile_index: usize,
        line: usize,
        channel_lines: usize,
        tile: &mut [Line],
        add: impl FnOnce(&mut [Line]),
    ) {
        let [height, width] = self.size_out();
        let [_, tiles_x] = self.tiles::<M>();
        let channels = self.weights.channels_out;
        let first = line * LINE;
        let count = (channels - first).min(channel_lines * LINE);
        let tile = &mut tile[..M::TILE * M::TILE * channel_lines];
        let start = |tile: usize, size: usize| {
            let start = tile * M::TILE;
            start.max(M::TILE_MARGIN)..(start + M::TILE).min(size + M::TILE_MARGIN)
        };
        let ys = start(tile_index / tiles_x, height);
        let xs = start(tile_index % tiles_x, width);
        // Where a pixel is in the tile, and in an image.
        let pixels = || {
            ys.clone().flat_map(|y| xs.clone().map(move |x| (y, x))).map(|(y, x)| {
                let in_tile = (y % M::TILE * M::TILE + x % M::TILE) * channel_lines * LINE;
                (
                    in_tile,
                    ((y - M::TILE_MARGIN) * width + x - M::TILE_MARGIN) * channels + first,
                )
            })
        };
        tile.fill(Line::zeroed());
        if let Some(residual) = self.residual {
            let residual = &residual[strip.image * height * width * channels..];
            for (in_tile, position) in pixels() {
                E::widen(
                    &residual[position..][..count],
                    &mut floats_mut(tile)[in_tile..][..count],
                );
            }
        }
        add(tile);
        let before = strip.first_row * width * channels;
        for (in_tile, position) in pixels() {
            E::narrow(
                &floats_mut(tile)[in_tile..][..count],
                &mut strip.y[position - before..][..count],
            );
        }
    }
}

/// A patch of some lines of channels to its place on the left side.
struct TransformInput<'a, M> {
    patch: &'a [Line],
    channel_lines: usize,
    left: &'a mut [Line],
    /// Rows of the group, which is the step from line to line of channels.
    rows: usize,
    step: usize,
    method: PhantomData<M>,
}

impl<M: Method> WithSimd for TransformInput<'_, M> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self) {
        let per_line = LINE / S::lanes32();
        let (patch, left) = (vectors::<S>(self.patch), vectors_mut::<S>(self.left));
        for line in 0..self.channel_lines {
            for part in 0..per_line {
                let patch = &patch[line * per_line + part..];
                let left = &mut left[line * self.rows * per_line + part..];
                M::transform_input(patch, self.channel_lines * per_line, left, self.step * per_line);
            }
        }
    }
}

/// Adds the tile of some products and the bias to what `tile` holds.
struct TransformOutput<'a, M> {
    products: &'a [Line],
    step: usize,
    bias: &'a [Line],
    tile: &'a mut [Line],
    method: PhantomData<M>,
}

impl<M: Method> WithSimd for TransformOutput<'_, M> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self) {
        let step = self.step * (LINE / S::lanes32());
        let (products, bias, tile) = (
            vectors::<S>(self.products),
            vectors::<S>(self.bias),
            vectors_mut::<S>(self.tile),
        );
        for (column, &value) in bias.iter().enumerate() {
            M::transform_output(&products[column..], step, value, &mut tile[column..], bias.len());
        }
    }
}

/// `values`, and zeros up to a whole line.
fn padded(values: &[f32]) -> Vec<Line> {
    let mut padded = zeroed_vec(lines(values.len()));
    floats_mut(&mut padded)[..values.len()].copy_from_slice(values);
    padded
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use ConvKind::{Point, Square, Upsample};

    /// What a convolution is called with.
    #[derive(Clone, Debug)]
    struct Case {
        kind: ConvKind,
        size: [usize; 3],
        channels_in: usize,
        channels_out: usize,
        mean: f32,
        residual: bool,
        seed: u64,
    }

    /// Values between -1 and 1 (splitmix64).
    fn values(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn rounded<E: Element>(values: &[f32]) -> Vec<E> {
        let mut narrow = vec![E::default(); values.len()];
        E::narrow(values, &mut narrow);
        narrow
    }

    fn widened<E: Element>(values: &[E]) -> Vec<f32> {
        let mut wide = vec![0.0; values.len()];
        E::widen(values, &mut wide);
        wide
    }

    impl Case {
        fn new(kind: ConvKind, size: [usize; 3], channels_in: usize, channels_out: usize) -> Self {
            Self {
                kind,
                size,
                channels_in,
                channels_out,
                mean: 0.0,
                residual: false,
                seed: 7,
            }
        }

        fn size_out(&self) -> usize {
            let [batch, height, width] = self.size;
            batch * height * width * self.kind.phases() * self.kind.phases() * self.channels_out
        }

        /// As large as they must be for outputs near one.
        fn weight(&self) -> Vec<f32> {
            let taps = taps(self.kind);
            let scale = (3.0 / (taps * self.channels_in) as f32).sqrt();
            let weight = values(self.seed, self.channels_out * self.channels_in * taps);
            weight.into_iter().map(|value| value * scale).collect()
        }

        fn bias(&self) -> Vec<f32> {
            values(self.seed + 1, self.channels_out)
        }

        fn x<E: Element>(&self) -> Vec<E> {
            let x = values(self.seed + 2, self.size.iter().product::<usize>() * self.channels_in);
            rounded(&x.into_iter().map(|value| value + self.mean).collect::<Vec<_>>())
        }

        fn residual<E: Element>(&self) -> Option<Vec<E>> {
            self.residual.then(|| rounded(&values(self.seed + 3, self.size_out())))
        }

        fn run<E: Element>(&self, isa: Isa) -> Vec<E> {
            let weights = ConvWeights::pack_for(isa, self.kind, &self.weight(), self.channels_out, self.channels_in);
            // Every element has to be written.
            let mut y = rounded(&vec![f32::NAN; self.size_out()]);
            conv(
                &weights,
                &self.bias(),
                self.size,
                [0, 0],
                &self.x(),
                self.residual::<E>().as_deref(),
                &mut y,
            );
            y
        }

        /// Bypasses the choice between methods.
        fn run_by<M: Method>(&self, isa: Isa) -> Vec<f32> {
            let weights = ConvWeights::pack_for(isa, self.kind, &self.weight(), self.channels_out, self.channels_in);
            let bias = padded(&self.bias());
            let (x, residual) = (self.x(), self.residual());
            let [batch, height, width] = self.size;
            let images = Images {
                batch,
                height,
                width,
                halo: [0, 0],
                x: &x,
                residual: residual.as_deref(),
                bias: &bias,
                weights: &weights,
            };
            let mut y = vec![f32::NAN; self.size_out()];
            if M::PRODUCTS == 1 {
                images.convolve::<M>(&weights.data, &mut y);
            } else {
                images.convolve::<M>(&weights.transform::<M>(), &mut y);
            }
            y
        }

        /// The definition, in `f64`.
        fn expected<E: Element>(&self) -> Vec<f64> {
            let (weight, bias, x) = (self.weight(), self.bias(), widened(&self.x::<E>()));
            let residual = self.residual::<E>().map(|residual| widened(&residual));
            let side = if taps(self.kind) == 1 { 1 } else { 3 };
            let scale = self.kind.phases();
            let [batch, height, width] = self.size;
            let mut y = Vec::with_capacity(self.size_out());
            for image in 0..batch {
                for (row, column) in (0..height * scale).flat_map(|y| (0..width * scale).map(move |x| (y, x))) {
                    for (out, &bias) in bias.iter().enumerate() {
                        let mut sum = f64::from(bias);
                        for (tap_y, tap_x) in (0..side).flat_map(|y| (0..side).map(move |x| (y, x))) {
                            let (row, column) = (row + tap_y, column + tap_x);
                            let inside =
                                |position: usize, size: usize| position.checked_sub(side / 2).filter(|&p| p < size);
                            let (Some(row), Some(column)) =
                                (inside(row, height * scale), inside(column, width * scale))
                            else {
                                continue;
                            };
                            let pixel = (image * height + row / scale) * width + column / scale;
                            for channel in 0..self.channels_in {
                                let tap = ((out * self.channels_in + channel) * side + tap_y) * side + tap_x;
                                sum += f64::from(weight[tap]) * f64::from(x[pixel * self.channels_in + channel]);
                            }
                        }
                        if let Some(residual) = &residual {
                            sum += f64::from(residual[y.len()]);
                        }
                        y.push(sum);
                    }
                }
            }
            y
        }

        /// `absolute` plus `relative` times the expected value.
        #[track_caller]
        fn assert_close<E: Element>(&self, found: &[E], absolute: f64, relative: f64) {
            let expected = self.expected::<E>();
            assert_eq!(found.len(), expected.len());
            for (index, (&found, expected)) in widened(found).iter().zip(expected).enumerate() {
                assert!(
                    (f64::from(found) - expected).abs() <= absolute + relative * expected.abs(),
                    "{self:?}: element {index} is {found}, not {expected}"
                );
            }
        }
    }

    /// Of outputs near one, in `f32`; the largest seen is a quarter of it.
    const TOLERANCE: f64 = 2e-5;

    #[test]
    fn channels_of_every_family_and_sizes_around_a_tile() {
        let channels = [
            (4, 512),
            (16, 96),
            (24, 48),
            (48, 24),
            (96, 96),
            (192, 96),
            (384, 192),
            (128, 3),
            (1, 1),
            (512, 130),
        ];
        for (index, (channels_in, channels_out)) in channels.into_iter().enumerate() {
            for kind in [Point, Square, Upsample] {
                let size = [1, index % 5 + 1, 9 - index % 7];
                let mut case = Case::new(kind, size, channels_in, channels_out);
                case.residual = index % 2 == 1;
                case.assert_close(&case.run::<f32>(Isa::detect()), TOLERANCE, 0.0);
            }
        }
    }

    #[test]
    fn every_method_on_every_instruction_set() {
        for isa in Isa::all() {
            // 18 and 35 output channels: panels of one and two vectors, and a part of one.
            for channels_out in [5, 18, 35, 130] {
                let mut case = Case::new(Square, [2, 13, 14], 21, channels_out);
                case.residual = true;
                case.assert_close(&case.run_by::<Winograd>(isa), TOLERANCE, 0.0);
                case.assert_close(&case.run_by::<Direct<3>>(isa), TOLERANCE, 0.0);
                case.kind = Point;
                case.assert_close(&case.run_by::<Direct<1>>(isa), TOLERANCE, 0.0);
                case.kind = Upsample;
                case.assert_close(&case.run_by::<super::Upsample>(isa), TOLERANCE, 0.0);
            }
        }
    }

    #[test]
    fn sums_longer_than_a_chunk_are_added_up() {
        for channels_in in [127, 128, 129, 300] {
            let case = Case::new(Square, [1, 6, 5], channels_in, 33);
            case.assert_close(&case.run_by::<Winograd>(Isa::detect()), TOLERANCE, 0.0);
            case.assert_close(&case.run_by::<Direct<3>>(Isa::detect()), TOLERANCE, 0.0);
        }
    }

    #[test]
    fn strips_and_blocks_leave_no_gap() {
        // More tiles in a row than a block takes, and rows that several strips share.
        for (kind, height, width) in [
            (Square, 9, 270),
            (Square, 61, 43),
            (Upsample, 5, 140),
            (Upsample, 31, 22),
            (Point, 3, 200),
        ] {
            let case = Case::new(kind, [2, height, width], 3, 2);
            case.assert_close(&case.run::<f32>(Isa::detect()), TOLERANCE, 0.0);
        }
    }

    #[test]
    fn a_large_mean_costs_its_share_and_no_more() {
        // Zero padding makes steps of the mean at the borders: the worst case for a tile's transform.
        for kind in [Point, Square, Upsample] {
            let mut case = Case::new(kind, [1, 12, 11], 64, 8);
            case.mean = 1000.0;
            case.assert_close(&case.run::<f32>(Isa::detect()), 1000.0 * TOLERANCE, 0.0);
        }
        let mut case = Case::new(Square, [1, 12, 11], 64, 8);
        case.mean = 1000.0;
        case.assert_close(&case.run_by::<Winograd>(Isa::detect()), 1000.0 * TOLERANCE, 0.0);
    }

    #[test]
    fn the_error_of_full_size_sums_stays_near_a_millionth() {
        for (kind, bound) in [(Point, 5e-7), (Square, 1.5e-6), (Upsample, 1e-6)] {
            let case = Case::new(kind, [1, 16, 16], 512, 16);
            let found = if kind == Square {
                case.run_by::<Winograd>(Isa::detect())
            } else {
                case.run(Isa::detect())
            };
            let expected = case.expected::<f32>();
            let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
            let error = square(
                &mut found
                    .iter()
                    .zip(&expected)
                    .map(|(&found, expected)| f64::from(found) - expected),
            );
            let relative = (error / square(&mut expected.iter().copied())).sqrt();
            assert!(relative <= bound, "{kind:?}: {relative:e}");
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        for (kind, channels_in, channels_out) in [
            (Point, 40, 33),
            (Square, 40, 33),
            (Upsample, 40, 33),
            (Square, 130, 140),
        ] {
            let mut case = Case::new(kind, [2, 29, 23], channels_in, channels_out);
            case.residual = true;
            let bits = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let y = pool.install(|| case.run::<f32>(Isa::detect()));
                y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let one = bits(1);
            for threads in [2, 3] {
                assert!(bits(threads) == one, "{kind:?} with {threads} threads");
            }
        }
    }

    #[test]
    fn infinity_reaches_all_that_depend_on_it() {
        // 3x3 by both methods.
        for (kind, size, reach) in [
            (Point, 5, 0..1),
            (Square, 5, -1..2),
            (Square, 40, -1..2),
            (Upsample, 5, -1..3),
        ] {
            let weights = ConvWeights::pack(kind, &vec![1.0; taps(kind)], 1, 1);
            let mut x = vec![0.0f32; size * size];
            x[2 * size + 2] = f32::INFINITY;
            let scale = kind.phases();
            let mut y = vec![0.0f32; x.len() * scale * scale];
            conv(&weights, &[0.0], [1, size, size], [0, 0], &x, None, &mut y);
            for (row, column) in reach
                .clone()
                .flat_map(|row| reach.clone().map(move |column| (row, column)))
            {
                let [row, column] = [row, column].map(|step| (2 * scale).strict_add_signed(step));
                let found = y[row * size * scale + column];
                assert!(!found.is_finite(), "{kind:?} at {row}, {column}: {found}");
            }
        }
    }

    #[test]
    fn a_band_of_rows_with_its_halo_gives_the_rows_of_the_whole() {
        // By every method, at both ends and in between; the halo is less than a tile and not a multiple of it.
        for (kind, size, channels) in [
            (Point, [2, 13, 9], 5),
            (Square, [2, 13, 9], 5),
            (Square, [2, 41, 40], 5),
            (Upsample, [2, 13, 9], 5),
        ] {
            let mut case = Case::new(kind, size, 3, channels);
            case.residual = true;
            let [batch, height, width] = size;
            let scale = kind.phases();
            let rows_of = |values: &[f32], height: usize, row: usize, rows: Range<usize>| {
                let image = |image: &[f32]| image[rows.start * row..rows.end * row].to_vec();
                values.chunks_exact(height * row).flat_map(image).collect::<Vec<_>>()
            };
            let expected: Vec<f32> = case.expected::<f32>().into_iter().map(|value| value as f32).collect();
            let residual = case.residual::<f32>().unwrap();
            let weights = ConvWeights::pack(kind, &case.weight(), channels, 3);
            for (core, halo) in [
                (0..1, [0, 1]),
                (0..5, [0, 1]),
                (5..12, [1, 1]),
                (12..height, [1, 0]),
                (3..height, [1, 0]),
            ] {
                let x = rows_of(&case.x(), height, width * 3, core.start - halo[0]..core.end + halo[1]);
                let out = core.start * scale..core.end * scale;
                let row = width * scale * channels;
                let residual = rows_of(&residual, height * scale, row, out.clone());
                let rows = core.len() + halo[0] + halo[1];
                let mut y = vec![f32::NAN; residual.len()];
                conv(
                    &weights,
                    &case.bias(),
                    [batch, rows, width],
                    halo,
                    &x,
                    Some(&residual),
                    &mut y,
                );
                let expected = rows_of(&expected, height * scale, row, out);
                let worst = y
                    .iter()
                    .zip(&expected)
                    .map(|(a, b)| f64::from((a - b).abs()))
                    .fold(0.0, f64::max);
                assert!(
                    y.iter().all(|value| value.is_finite()) && worst <= TOLERANCE,
                    "{kind:?} {core:?}: {worst:e}"
                );
            }
        }
    }

    #[test]
    fn an_empty_batch_is_left_alone() {
        let weights = ConvWeights::pack(Square, &[0.0; 18], 1, 2);
        conv::<f32>(&weights, &[0.0], [0, 4, 4], [0, 0], &[], None, &mut []);
    }

    #[test]
    #[should_panic(expected = "length of the residual")]
    fn a_residual_of_another_size_is_refused() {
        let weights = ConvWeights::pack(Point, &[1.0], 1, 1);
        conv(
            &weights,
            &[0.0],
            [1, 1, 2],
            [0, 0],
            &[1.0f32; 2],
            Some(&[1.0; 3]),
            &mut [0.0; 2],
        );
    }

    fn cases() -> impl Strategy<Value = Case> {
        let kind = prop_oneof![Just(Point), Just(Square), Just(Upsample)];
        let size = (1..3usize, 1..27usize, 1..27usize);
        (
            kind,
            size,
            1..40usize,
            1..40usize,
            -2.0..2.0f32,
            any::<bool>(),
            any::<u32>(),
        )
            .prop_map(
                |(kind, (batch, height, width), channels_in, channels_out, mean, residual, seed)| Case {
                    kind,
                    size: [batch, height, width],
                    channels_in,
                    channels_out,
                    mean,
                    residual,
                    seed: seed.into(),
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_shape_in_any_type(case in cases()) {
            let absolute = 4.0 * TOLERANCE;
            case.assert_close(&case.run::<f32>(Isa::detect()), absolute, 0.0);
            // Half an ulp: one rounding, at the end.
            case.assert_close(&case.run::<f16>(Isa::detect()), absolute, 0.5 * f64::from(f16::EPSILON));
            case.assert_close(&case.run::<bf16>(Isa::detect()), absolute, 0.5 * f64::from(bf16::EPSILON));
        }

        #[test]
        fn any_shape_by_winograd(mut case in cases()) {
            case.kind = Square;
            case.assert_close(&case.run_by::<Winograd>(Isa::detect()), 4.0 * TOLERANCE, 0.0);
        }
    }
}

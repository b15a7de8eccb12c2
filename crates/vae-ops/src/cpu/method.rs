//! Ways to compute a tile of outputs from a patch of inputs with matrix products over the channels.

use macerator::{Scalar, Simd, Vector};

/// A vector of each of the 3x3 weights.
pub(super) type Taps<S> = [[Vector<S, f32>; 3]; 3];

/// A patch of inputs becomes `INPUTS` transformed inputs; each of `PRODUCTS` products multiplies one of them with weights;
/// the products become a tile of outputs.
///
/// The transforms work on one vector of channels. Where they take a slice and a step, elements are a step apart. There
/// are no closures in them on purpose: a closure that is not inlined loses the instruction set.
pub(super) trait Method: Send + Sync {
    /// Side of a patch.
    const PATCH: usize;
    /// From patch to patch, in input pixels.
    const STEP: usize;
    /// Pixels of the first patch before the image.
    const MARGIN: usize;
    /// Side of a tile, and from tile to tile, in output pixels.
    const TILE: usize;
    /// Pixels of the first tile before the image.
    const TILE_MARGIN: usize;
    /// Transformed inputs.
    const INPUTS: usize;
    /// Vectors of channels in a transformed input.
    const TAPS: usize;
    /// Matrix products.
    const PRODUCTS: usize;
    /// Tiles that are transformed together: enough to use each weight often, few enough that scratch memory with 512
    /// channels stays within six MiB a thread.
    const TILES: usize;

    /// The transformed input that a product multiplies.
    fn input_of(product: usize) -> usize;

    /// A patch to `INPUTS` or `TAPS` vectors.
    fn transform_input<S: Simd>(patch: &[Vector<S, f32>], step: usize, to: &mut [Vector<S, f32>], to_step: usize);

    /// 3x3 weights to those of the products.
    fn transform_weights<S: Simd>(taps: Taps<S>, to: &mut [Vector<S, f32>], to_step: usize);

    /// Adds the tile of the products and a bias.
    fn transform_output<S: Simd>(
        products: &[Vector<S, f32>],
        step: usize,
        bias: Vector<S, f32>,
        to: &mut [Vector<S, f32>],
        to_step: usize,
    );
}

/// One product with all `SIDE` x `SIDE` taps (implicit GEMM).
pub(super) struct Direct<const SIDE: usize>;

impl<const SIDE: usize> Method for Direct<SIDE> {
    const PATCH: usize = SIDE;
    const STEP: usize = 1;
    const MARGIN: usize = SIDE / 2;
    const TILE: usize = 1;
    const TILE_MARGIN: usize = 0;
    const INPUTS: usize = 1;
    const TAPS: usize = SIDE * SIDE;
    const PRODUCTS: usize = 1;
    const TILES: usize = 128;

    #[inline(always)]
    fn input_of(product: usize) -> usize {
        product
    }

    #[inline(always)]
    fn transform_input<S: Simd>(patch: &[Vector<S, f32>], step: usize, to: &mut [Vector<S, f32>], to_step: usize) {
        for tap in 0..SIDE * SIDE {
            to[tap * to_step] = patch[tap * step];
        }
    }

    fn transform_weights<S: Simd>(_: Taps<S>, _: &mut [Vector<S, f32>], _: usize) {
        unreachable!("weights are used as they are")
    }

    #[inline(always)]
    fn transform_output<S: Simd>(
        products: &[Vector<S, f32>],
        _: usize,
        bias: Vector<S, f32>,
        to: &mut [Vector<S, f32>],
        _: usize,
    ) {
        to[0] += products[0] + bias;
    }
}

/// Winograd's F(4x4, 3x3) ([Lavin & Gray 2015](https://arxiv.org/abs/1509.09308)): 36 products for 16 outputs, a quarter
/// of the arithmetic.
///
/// The points are 0, ±3/4, ±3/2 and infinity. With them an `f32` result is about as exact as that of one long sum; with
/// the customary 0, ±1, ±2 errors are more than twice as large.
pub(super) struct Winograd;

const A: f32 = 0.75;
const B: f32 = 1.5;
const AA: f32 = A * A;
const BB: f32 = B * B;

#[inline(always)]
fn scaled<S: Simd>(factor: f32, x: Vector<S, f32>) -> Vector<S, f32> {
    factor.splat::<S>() * x
}

/// `factor * x + add`
#[inline(always)]
fn plus<S: Simd>(add: Vector<S, f32>, factor: f32, x: Vector<S, f32>) -> Vector<S, f32> {
    factor.splat::<S>().mul_add(x, add)
}

impl Winograd {
    #[inline(always)]
    fn input<S: Simd>(d: [Vector<S, f32>; 6]) -> [Vector<S, f32>; 6] {
        let (even_a, odd_a) = (plus(d[4], -BB, d[2]), plus(d[3], -BB, d[1]));
        let (even_b, odd_b) = (plus(d[4], -AA, d[2]), plus(d[3], -AA, d[1]));
        [
            plus(plus(d[4], -(AA + BB), d[2]), AA * BB, d[0]),
            plus(even_a, A, odd_a),
            plus(even_a, -A, odd_a),
            plus(even_b, B, odd_b),
            plus(even_b, -B, odd_b),
            plus(plus(d[5], -(AA + BB), d[3]), AA * BB, d[1]),
        ]
    }

    #[inline(always)]
    fn weights<S: Simd>(g: [Vector<S, f32>; 3]) -> [Vector<S, f32>; 6] {
        const OTHERS_A: f32 = 2.0 * AA * (AA - BB);
        const OTHERS_B: f32 = 2.0 * BB * (BB - AA);
        let (even_a, odd_a) = (
            plus(scaled(1.0 / OTHERS_A, g[0]), AA / OTHERS_A, g[2]),
            scaled(A / OTHERS_A, g[1]),
        );
        let (even_b, odd_b) = (
            plus(scaled(1.0 / OTHERS_B, g[0]), BB / OTHERS_B, g[2]),
            scaled(B / OTHERS_B, g[1]),
        );
        [
            scaled(1.0 / (AA * BB), g[0]),
            even_a + odd_a,
            even_a - odd_a,
            even_b + odd_b,
            even_b - odd_b,
            g[2],
        ]
    }

    #[inline(always)]
    fn output<S: Simd>(m: [Vector<S, f32>; 6]) -> [Vector<S, f32>; 4] {
        let (even_a, odd_a) = (m[1] + m[2], m[1] - m[2]);
        let (even_b, odd_b) = (m[3] + m[4], m[3] - m[4]);
        [
            m[0] + (even_a + even_b),
            plus(scaled(B, odd_b), A, odd_a),
            plus(scaled(BB, even_b), AA, even_a),
            plus(plus(m[5], B * BB, odd_b), A * AA, odd_a),
        ]
    }
}

impl Method for Winograd {
    const PATCH: usize = 6;
    const STEP: usize = 4;
    const MARGIN: usize = 1;
    const TILE: usize = 4;
    const TILE_MARGIN: usize = 0;
    const INPUTS: usize = 36;
    const TAPS: usize = 1;
    const PRODUCTS: usize = 36;
    const TILES: usize = 64;

    #[inline(always)]
    fn input_of(product: usize) -> usize {
        product
    }

    #[inline(always)]
    fn transform_input<S: Simd>(patch: &[Vector<S, f32>], step: usize, to: &mut [Vector<S, f32>], to_step: usize) {
        let mut rows = [[0f32.splat::<S>(); 6]; 6];
        for y in 0..6 {
            let mut row = [0f32.splat::<S>(); 6];
            for x in 0..6 {
                row[x] = patch[(y * 6 + x) * step];
            }
            rows[y] = Self::input(row);
        }
        for x in 0..6 {
            let column = Self::input([rows[0][x], rows[1][x], rows[2][x], rows[3][x], rows[4][x], rows[5][x]]);
            for y in 0..6 {
                to[(y * 6 + x) * to_step] = column[y];
            }
        }
    }

    #[inline(always)]
    fn transform_weights<S: Simd>(taps: Taps<S>, to: &mut [Vector<S, f32>], to_step: usize) {
        let rows = [Self::weights(taps[0]), Self::weights(taps[1]), Self::weights(taps[2])];
        for x in 0..6 {
            let column = Self::weights([rows[0][x], rows[1][x], rows[2][x]]);
            for y in 0..6 {
                to[(y * 6 + x) * to_step] = column[y];
            }
        }
    }

    #[inline(always)]
    fn transform_output<S: Simd>(
        products: &[Vector<S, f32>],
        step: usize,
        bias: Vector<S, f32>,
        to: &mut [Vector<S, f32>],
        to_step: usize,
    ) {
        let mut rows = [[0f32.splat::<S>(); 4]; 6];
        for y in 0..6 {
            let mut row = [0f32.splat::<S>(); 6];
            for x in 0..6 {
                row[x] = products[(y * 6 + x) * step];
            }
            rows[y] = Self::output(row);
        }
        for x in 0..4 {
            let column = Self::output([rows[0][x], rows[1][x], rows[2][x], rows[3][x], rows[4][x], rows[5][x]]);
            for y in 0..4 {
                to[(y * 4 + x) * to_step] += column[y] + bias;
            }
        }
    }
}

/// Nearest-neighbour upsampling by two and a 3x3 convolution, on the small image: 25 products for 16 outputs instead of
/// 144.
///
/// In one dimension with taps a, b, c, upsampled pixels 2i and 2i + 1 are `a x[i-1] + (b+c) x[i]` and
/// `(a+b) x[i] + c x[i+1]`. Four outputs from the odd one on need three inputs x0, x1, x2, two of each kind, and five
/// products, since both kinds share that with the sum of all taps:
///
/// ```text
/// (a+b) (x0-x1), c (x1-x2), (a+b+c) x1, a (x0-x1), (b+c) (x1-x2)
/// ```
pub(super) struct Upsample;

impl Upsample {
    #[inline(always)]
    fn input<S: Simd>([x0, x1, x2]: [Vector<S, f32>; 3]) -> [Vector<S, f32>; 3] {
        [x0 - x1, x1, x1 - x2]
    }

    #[inline(always)]
    fn weights<S: Simd>([a, b, c]: [Vector<S, f32>; 3]) -> [Vector<S, f32>; 5] {
        [a + b, c, a + b + c, a, b + c]
    }

    #[inline(always)]
    fn output<S: Simd>(m: [Vector<S, f32>; 5]) -> [Vector<S, f32>; 4] {
        [m[2] + m[0], m[2] + m[3], m[2] - m[1], m[2] - m[4]]
    }
}

impl Method for Upsample {
    const PATCH: usize = 3;
    const STEP: usize = 2;
    const MARGIN: usize = 1;
    const TILE: usize = 4;
    const TILE_MARGIN: usize = 1;
    const INPUTS: usize = 9;
    const TAPS: usize = 1;
    const PRODUCTS: usize = 25;
    const TILES: usize = 128;

    #[inline(always)]
    fn input_of(product: usize) -> usize {
        // Of the five products along an axis.
        const INPUT: [usize; 5] = [0, 2, 1, 0, 2];
        INPUT[product / 5] * 3 + INPUT[product % 5]
    }

    #[inline(always)]
    fn transform_input<S: Simd>(patch: &[Vector<S, f32>], step: usize, to: &mut [Vector<S, f32>], to_step: usize) {
        let mut rows = [[0f32.splat::<S>(); 3]; 3];
        for y in 0..3 {
            rows[y] = Self::input([
                patch[y * 3 * step],
                patch[(y * 3 + 1) * step],
                patch[(y * 3 + 2) * step],
            ]);
        }
        for x in 0..3 {
            let column = Self::input([rows[0][x], rows[1][x], rows[2][x]]);
            for y in 0..3 {
                to[(y * 3 + x) * to_step] = column[y];
            }
        }
    }

    #[inline(always)]
    fn transform_weights<S: Simd>(taps: Taps<S>, to: &mut [Vector<S, f32>], to_step: usize) {
        let rows = [Self::weights(taps[0]), Self::weights(taps[1]), Self::weights(taps[2])];
        for x in 0..5 {
            let column = Self::weights([rows[0][x], rows[1][x], rows[2][x]]);
            for y in 0..5 {
                to[(y * 5 + x) * to_step] = column[y];
            }
        }
    }

    #[inline(always)]
    fn transform_output<S: Simd>(
        products: &[Vector<S, f32>],
        step: usize,
        bias: Vector<S, f32>,
        to: &mut [Vector<S, f32>],
        to_step: usize,
    ) {
        let mut rows = [[0f32.splat::<S>(); 4]; 5];
        for y in 0..5 {
            let mut row = [0f32.splat::<S>(); 5];
            for x in 0..5 {
                row[x] = products[(y * 5 + x) * step];
            }
            rows[y] = Self::output(row);
        }
        for x in 0..4 {
            let column = Self::output([rows[0][x], rows[1][x], rows[2][x], rows[3][x], rows[4][x]]);
            for y in 0..4 {
                to[(y * 4 + x) * to_step] += column[y] + bias;
            }
        }
    }
}

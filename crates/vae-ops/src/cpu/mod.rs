//! Convolutions and group normalisation for the CPU, on channels-last slices.
//!
//! Plain functions: no Burn in them, no state, no memory kept between calls. Vector instructions are chosen at run time,
//! work is spread over rayon's threads, and bits do not depend on how many there are.
//!
//! | | how |
//! |---|---|
//! | 3x3 | Winograd F(4x4, 3x3), a quarter of the products; small images directly |
//! | upsampling, then 3x3 | on the small image with 25 products for 16 outputs, instead of 144 |
//! | 1x1 | directly |
//! | group normalisation, SiLU | two passes over memory, sums in `f64` |
//!
//! A convolution takes its image in tiles: a few dozen at a time are gathered and transformed, multiplied with the weights
//! by `gemm`, transformed back and finished with bias and residual. Neither the columns of the image nor the upsampled
//! image ever exists.

mod conv;
mod element;
mod gemm;
mod group_norm;
mod method;
mod simd;
mod tensor;

pub use conv::{ConvWeights, conv};
pub use element::Element;
pub use group_norm::{group_norm, moments};
pub(crate) use tensor::{convolve, measure, normalize};

use burn::tensor::Tensor;

use crate::{Denoiser, Picture, PositionFeatures};

/// What a sampler's caller sees after each step.
#[derive(Debug)]
pub struct Step {
    /// From 0.
    pub index: usize,
    /// Of how many.
    pub count: usize,
    /// The latents that the denoiser expects to end with: what to preview. Enqueued, not yet computed.
    pub estimate: Tensor<4>,
}

/// Samples latents by Euler steps along a rectified flow, from noise at time 1 to latents at time 0, in equal steps.
///
/// # Shapes
/// - `noise`: standard normal, `[batch, 128, height, width]` in f32, on the denoiser's device
/// - returns the same: FLUX.2 latents in diffusion space
pub fn sample(
    denoiser: &Denoiser,
    noise: Tensor<4>,
    picture: Picture,
    steps: usize,
    on_step: &mut dyn FnMut(Step),
) -> Tensor<4> {
    let [_, _, height, width] = noise.dims();
    let position = PositionFeatures::new(height, width, &noise.device());
    let time = |step: usize| 1.0 - step as f32 / steps as f32;
    let mut x = noise;
    for index in 0..steps {
        let (t, next) = (time(index), time(index + 1));
        let estimate = denoiser.data(x.clone(), t, picture, &position);
        // From x at t along the line to the estimate at 0.
        x = x.mul_scalar(next / t) + estimate.clone().mul_scalar(1.0 - next / t);
        on_step(Step {
            index,
            count: steps,
            estimate,
        });
    }
    x
}

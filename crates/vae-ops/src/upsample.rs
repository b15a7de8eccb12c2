use burn::tensor::{
    Tensor,
    module::interpolate,
    ops::{InterpolateMode, InterpolateOptions},
};

/// Doubles height and width by repeating each pixel (nearest neighbour).
///
/// # Shapes
/// - `x`: `[batch, channels, height, width]`
/// - returns `[batch, channels, 2 * height, 2 * width]`
pub fn upsample_nearest2x(x: Tensor<4>) -> Tensor<4> {
    let [_, _, height, width] = x.dims();
    let options = InterpolateOptions::new(InterpolateMode::Nearest).with_output_size([2 * height, 2 * width]);
    interpolate(x, options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn every_pixel_is_repeated_on_odd_sizes() {
        let device = Device::flex();
        let x = Tensor::<4>::from_floats([[[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]]], &device);
        let y: Vec<f32> = upsample_nearest2x(x).into_data().try_into_vec().unwrap();
        let expected: [f32; 24] = [
            1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0, 6.0, 4.0, 4.0, 5.0,
            5.0, 6.0, 6.0,
        ];
        assert_eq!(y, expected);
    }
}

use burn::tensor::Tensor;

/// Undoes a 2x2 patchify: channels in the order `(channel, row, column)` become pixels.
///
/// # Shapes
/// - `x`: `[batch, 4 * channels, height, width]`
/// - returns `[batch, channels, 2 * height, 2 * width]`
pub fn unpatchify2x2(x: Tensor<4>) -> Tensor<4> {
    let [batch, channels, height, width] = x.dims();
    x.reshape([batch, channels / 4, 2, 2, height, width])
        .permute([0, 1, 4, 2, 5, 3])
        .reshape([batch, channels / 4, 2 * height, 2 * width])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn channel_order_is_channel_row_column() {
        let device = Device::flex();
        // Two channels, one pixel: patch (row, column) of channel c has the value 10c + 2 row + column.
        let x = Tensor::<1>::from_floats([0., 1., 2., 3., 10., 11., 12., 13.], &device).reshape([1, 8, 1, 1]);
        let y: Vec<f32> = unpatchify2x2(x).into_data().try_into_vec().unwrap();
        assert_eq!(y, [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0f32]);
    }

    #[test]
    fn rows_and_columns_are_not_swapped_on_wide_maps() {
        let device = Device::flex();
        let x = Tensor::<1>::from_floats([0., 1., 2., 3., 4., 5., 6., 7.], &device).reshape([1, 4, 1, 2]);
        let y: Vec<f32> = unpatchify2x2(x).into_data().try_into_vec().unwrap();
        assert_eq!(y, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0f32]);
    }
}

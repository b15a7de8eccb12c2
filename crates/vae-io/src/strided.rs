//! Arrays whose elements do not lie in row-major order.

/// The elements of a view of `values` in row-major order. Strides count elements.
///
/// # Panics
///
/// When the view leaves `values`; callers check it against the file first.
pub(crate) fn row_major(values: Vec<f32>, shape: &[usize], strides: &[usize]) -> Vec<f32> {
    if shape.contains(&0) {
        return Vec::new();
    }
    let count = shape.iter().product();
    if count == values.len() && is_row_major(shape, strides) {
        return values;
    }
    let mut index = vec![0; shape.len()];
    let mut source = 0;
    let mut out = Vec::with_capacity(count);
    for _ in 0..count {
        out.push(values[source]);
        // Counts up `index` like an odometer, the last dimension fastest, and `source` with it.
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            source += strides[d];
            if index[d] < shape[d] {
                break;
            }
            source -= strides[d] * shape[d];
            index[d] = 0;
        }
    }
    out
}

/// Strides of dimensions of size one are never stepped and may be anything.
fn is_row_major(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size;
        fits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: &[usize], strides: &[usize], last: usize) -> Vec<f32> {
        row_major((0..=last).map(|i| i as f32).collect(), shape, strides)
    }

    #[test]
    fn strides_are_followed() {
        assert_eq!(view(&[2, 3], &[3, 1], 5), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(view(&[2, 3], &[1, 2], 5), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        // Every other column, a row repeated, overlapping windows, a scalar.
        assert_eq!(view(&[2, 2], &[4, 2], 6), [0.0, 2.0, 4.0, 6.0]);
        assert_eq!(view(&[2, 2], &[0, 1], 1), [0.0, 1.0, 0.0, 1.0]);
        assert_eq!(view(&[2, 2], &[1, 1], 2), [0.0, 1.0, 1.0, 2.0]);
        assert_eq!(view(&[], &[], 0), [0.0]);
    }

    #[test]
    fn the_stride_of_a_dimension_of_one_means_nothing() {
        assert_eq!(view(&[1, 1, 2], &[7, 100, 1], 1), [0.0, 1.0]);
    }

    #[test]
    fn an_empty_view_counts_nothing() {
        assert!(row_major(vec![], &[0, usize::MAX, usize::MAX], &[1, 1, 1]).is_empty());
    }

    #[test]
    fn a_view_of_less_than_all_values_is_no_copy_of_all() {
        assert_eq!(view(&[2, 2], &[2, 1], 9), [0.0, 1.0, 2.0, 3.0]);
    }
}

//! Element types of activations.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element type of activations: `f32`, `f16` or `bf16`. Arithmetic is in `f32` whatever it is.
pub trait Element: Copy + Default + Send + Sync + sealed::Sealed + 'static {
    /// Converts `from` into `to`, exactly. Both have the same length.
    fn widen(from: &[Self], to: &mut [f32]);

    /// Rounds `from` into `to`, to nearest, ties to even. Both have the same length.
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    #[inline(always)]
    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Element for f16 {
    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
}

impl Element for bf16 {
    fn widen(from: &[bf16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [bf16]) {
        to.convert_from_f32_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_nearest<E: Element + PartialEq + std::fmt::Debug>(from: &[f32], expected: &[E], wide: &[f32]) {
        let mut narrow = vec![E::default(); from.len()];
        E::narrow(from, &mut narrow);
        assert_eq!(narrow, expected);
        let mut widened = vec![0.0; from.len()];
        E::widen(&narrow, &mut widened);
        assert_eq!(widened, wide);
    }

    #[test]
    fn rounding_is_to_nearest_and_ties_go_to_even() {
        // Long enough for the vector code and what it leaves over.
        let repeat = |values: &[f32]| values.iter().copied().cycle().take(19).collect::<Vec<_>>();
        let from = repeat(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -3.1e38]);
        let wide = repeat(&[1.0, 1.0 + 4.0 / 256.0, bf16::from_f32(-3.1e38).to_f32()]);
        assert_nearest(
            &from,
            &wide
                .iter()
                .map(|&value| bf16::from_f32_const(value))
                .collect::<Vec<_>>(),
            &wide,
        );
        let from = repeat(&[1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65_520.0]);
        let wide = repeat(&[1.0, 1.0 + 4.0 / 2048.0, f32::INFINITY]);
        assert_nearest(
            &from,
            &wide.iter().map(|&value| f16::from_f32_const(value)).collect::<Vec<_>>(),
            &wide,
        );
    }
}

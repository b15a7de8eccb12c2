//! The third kernel of attention: the ranges of keys become one, and the result is finished.

use cubecl::prelude::*;

/// Values of a unit.
pub const VECTOR: u32 = 4;
/// Units of a cube.
pub const UNITS: u32 = 256;

/// `sum of weight * partial / sum of weight * sum + bias + residual` over the ranges, with weights
/// `2^(reference - largest reference)`.
///
/// `partials` are `[ranges, chunk_rows, channels]`, `sums` and `references` `[ranges, chunk_rows]`; `residual` and `out` start
/// at the chunk's first row, their strides are in vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub fn attention_merge_kernel<E: Float, V: Size>(
    partials: &[Vector<f32, V>],
    sums: &[f32],
    references: &[f32],
    bias: &[Vector<f32, V>],
    residual: &[Vector<E, V>],
    out: &mut [Vector<E, V>],
    rows: u32,
    chunk_rows: u32,
    ranges: u32,
    residual_stride: u32,
    out_stride: u32,
    #[comptime] row_vectors: u32,
    #[define(E)] _dtype: ElemType,
) {
    let row = ABSOLUTE_POS / comptime!(row_vectors as usize);
    let column = ABSOLUTE_POS % comptime!(row_vectors as usize);
    if row < rows as usize {
        let mut largest = references[row];
        for range in 1..ranges {
            largest = f32::max(largest, references[(range * chunk_rows) as usize + row]);
        }
        let mut sum = 0.0f32;
        let mut total = Vector::<f32, V>::new(0.0);
        for range in 0..ranges {
            let at = (range * chunk_rows) as usize + row;
            let weight = f32::exp((references[at] - largest) * std::f32::consts::LN_2);
            sum += weight * sums[at];
            total += Vector::new(weight) * partials[at * comptime!(row_vectors as usize) + column];
        }
        let residual = Vector::<f32, V>::cast_from(residual[row * residual_stride as usize + column]);
        let value = total / Vector::new(sum) + bias[column] + residual;
        out[row * out_stride as usize + column] = Vector::cast_from(value);
    }
}

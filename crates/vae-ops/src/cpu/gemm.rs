//! The matrix product inside every convolution here, on one thread, of operands that are packed already.
//!
//! Why not the gemm crate, which Burn's matrix products use: it packs its operands on every call and cannot know what
//! comes next. Here weights come packed, input transforms write the left side packed, and the next weights are
//! prefetched while these are used, so that products of 64 rows run as fast as large ones.

use macerator::{Scalar, Simd, Vector, WithSimd};

use super::simd::{LINE, Line, prefetch, vectors, vectors_mut};

/// Vectors of columns that a kernel computes at once.
const PANEL: usize = 2;

/// Lines of depth after which a sum is added to the others: the right side of a kernel stays in the L1 cache, and
/// sums of sums lose less than one long sum.
const CHUNK: usize = 8;

/// Splits `rows` into groups for the kernels, as many rows as the registers hold first: `(first row, rows)`.
pub(super) fn row_groups(lanes: usize, rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let sizes: &[usize] = if lanes == LINE || cfg!(target_arch = "aarch64") {
        &[12, 8, 4, 2, 1]
    } else {
        &[6, 4, 2, 1]
    };
    let mut next = 0;
    core::iter::from_fn(move || {
        let first = next;
        let size = *sizes.iter().find(|&&size| size <= rows - first)?;
        next += size;
        Some((first, size))
    })
}

/// Where the right side of [`Multiply`] keeps things; `columns` counts vectors.
///
/// For each [`CHUNK`] of depth, for each [`PANEL`] of columns (the last may be narrower): `[depth][columns]`. A product
/// reads it from front to back.
#[derive(Clone, Copy)]
pub(super) struct RightLayout {
    pub(super) depth: usize,
    pub(super) columns: usize,
}

impl RightLayout {
    /// Vectors in it.
    pub(super) fn len(self) -> usize {
        self.depth * self.columns
    }

    /// Where the vector of row `k` and column `column` is.
    #[inline(always)]
    pub(super) fn position(self, k: usize, column: usize) -> usize {
        let chunk = k / (CHUNK * LINE) * (CHUNK * LINE);
        let chunk_depth = (self.depth - chunk).min(CHUNK * LINE);
        let panel = column / PANEL * PANEL;
        let width = (self.columns - panel).min(PANEL);
        chunk * self.columns + panel * chunk_depth + (k - chunk) * width + (column - panel)
    }
}

/// `out[row][column] = sum over k of left[row][k] * right[k][column]`.
pub(super) struct Multiply<'a> {
    pub(super) rows: usize,
    /// For each of [`row_groups`]: `[depth / LINE][rows of the group][LINE]`.
    pub(super) left: &'a [Line],
    /// In `layout`; what follows is prefetched.
    pub(super) right: &'a [Line],
    pub(super) layout: RightLayout,
    /// `[rows][layout.columns]`.
    pub(super) out: &'a mut [Line],
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self) {
        let (rows, left) = (self.rows, self.left);
        let RightLayout { depth, columns } = self.layout;
        let mut right = vectors::<S>(self.right);
        let out = vectors_mut::<S>(self.out);
        for chunk in (0..depth).step_by(CHUNK * LINE) {
            let chunk_depth = (depth - chunk).min(CHUNK * LINE);
            for column in (0..columns).step_by(PANEL) {
                let width = (columns - column).min(PANEL);
                let (block, rest) = right.split_at(chunk_depth * width);
                let mut ahead = &rest[..rest.len().min(block.len())];
                for (row, size) in row_groups(S::lanes32(), rows) {
                    // Each group of rows fetches its share of the next block.
                    let share;
                    (share, ahead) = ahead.split_at((block.len() * size).div_ceil(rows).min(ahead.len()));
                    prefetch(share);
                    let left = &left[(row * depth + chunk * size) / LINE..][..chunk_depth / LINE * size];
                    let out = &mut out[row * columns + column..];
                    let add = chunk > 0;
                    match (width, size) {
                        (PANEL, 12) => kernel::<S, 12, PANEL>(left, block, out, columns, add),
                        (PANEL, 8) => kernel::<S, 8, PANEL>(left, block, out, columns, add),
                        (PANEL, 6) => kernel::<S, 6, PANEL>(left, block, out, columns, add),
                        (PANEL, 4) => kernel::<S, 4, PANEL>(left, block, out, columns, add),
                        (PANEL, 2) => kernel::<S, 2, PANEL>(left, block, out, columns, add),
                        (PANEL, _) => kernel::<S, 1, PANEL>(left, block, out, columns, add),
                        (_, 12) => kernel::<S, 12, 1>(left, block, out, columns, add),
                        (_, 8) => kernel::<S, 8, 1>(left, block, out, columns, add),
                        (_, 6) => kernel::<S, 6, 1>(left, block, out, columns, add),
                        (_, 4) => kernel::<S, 4, 1>(left, block, out, columns, add),
                        (_, 2) => kernel::<S, 2, 1>(left, block, out, columns, add),
                        (_, _) => kernel::<S, 1, 1>(left, block, out, columns, add),
                    }
                }
                right = rest;
            }
        }
    }
}

/// `ROWS` rows by `WIDTH` vectors of columns, summed in registers, `stride` vectors from row to row of `out`.
#[inline(always)]
fn kernel<S: Simd, const ROWS: usize, const WIDTH: usize>(
    left: &[Line],
    right: &[Vector<S, f32>],
    out: &mut [Vector<S, f32>],
    stride: usize,
    add: bool,
) {
    let mut sums = [[0f32.splat::<S>(); WIDTH]; ROWS];
    let (left, _) = left.as_chunks::<ROWS>();
    let (right, _) = right.as_chunks::<WIDTH>();
    let (right, _) = right.as_chunks::<LINE>();
    for (left, right) in left.iter().zip(right) {
        for k in 0..LINE {
            let right = right[k];
            for row in 0..ROWS {
                let value = left[row].0[k].splat::<S>();
                for column in 0..WIDTH {
                    sums[row][column] = value.mul_add(right[column], sums[row][column]);
                }
            }
        }
    }
    // Loops over constants, so that the sums are registers and not memory that is indexed.
    for row in 0..ROWS {
        let out = &mut out[row * stride..][..WIDTH];
        for column in 0..WIDTH {
            out[column] = if add {
                out[column] + sums[row][column]
            } else {
                sums[row][column]
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_group() {
        for lanes in [4, 8, 16] {
            for rows in 0..70 {
                let covered: Vec<usize> = row_groups(lanes, rows)
                    .flat_map(|(first, size)| first..first + size)
                    .collect();
                assert_eq!(covered, (0..rows).collect::<Vec<_>>(), "{lanes} lanes");
            }
        }
    }

    #[test]
    fn every_vector_of_the_right_side_has_its_own_place() {
        for (depth, columns) in [(16, 1), (16, 3), (128, 8), (144, 5), (4608, 2)] {
            let layout = RightLayout { depth, columns };
            let mut places: Vec<usize> = (0..depth)
                .flat_map(|k| (0..columns).map(move |column| layout.position(k, column)))
                .collect();
            places.sort_unstable();
            assert_eq!(places, (0..layout.len()).collect::<Vec<_>>(), "{depth} x {columns}");
        }
    }
}

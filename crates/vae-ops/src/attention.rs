use burn::tensor::{FloatDType, Tensor, activation::softmax};

/// Scores held at a time, in elements: 64 MiB of f32, against 16 GiB for all scores of 65,536 tokens.
const SCORE_ELEMENTS: usize = 1 << 24;

/// Softmax attention with one head: `softmax(q kᵀ / sqrt(channels)) v`.
///
/// Exact. Queries are taken in chunks of rows, so that the scores of all pairs of tokens never exist at once; scores
/// and softmax are f32 whatever the input's type, as in PyTorch's kernels.
///
/// # Shapes
/// - `q`, `k`, `v`: `[batch, tokens, channels]`
/// - returns the shape and type of `q`
pub fn attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>) -> Tensor<3> {
    let [batch, tokens, _] = q.dims();
    attention_in_chunks(q, k, v, (SCORE_ELEMENTS / (batch * tokens)).max(1))
}

fn attention_in_chunks(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, chunk: usize) -> Tensor<3> {
    let dtype: FloatDType = v.dtype().into();
    let [_, tokens, channels] = q.dims();
    let q = q.cast(FloatDType::F32).mul_scalar(1.0 / (channels as f64).sqrt());
    let k_transposed = k.cast(FloatDType::F32).swap_dims(1, 2);

    let rows = (0..tokens).step_by(chunk).map(|start| {
        let q = q.clone().narrow(1, start, chunk.min(tokens - start));
        let weights = softmax(q.matmul(k_transposed.clone()), 2);
        weights.cast(dtype).matmul(v.clone())
    });
    Tensor::cat(rows.collect(), 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    fn values(tensor: Tensor<3>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[test]
    fn matches_the_definition_in_f64() {
        let device = Device::flex();
        let q = Tensor::<3>::from_floats([[[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]]], &device);
        let k = Tensor::<3>::from_floats([[[0.5, 1.0], [1.0, -1.0], [2.0, 0.0]]], &device);
        let v = Tensor::<3>::from_floats([[[1.0, 2.0], [3.0, 4.0], [5.0, -6.0]]], &device);
        let scale = 1.0 / 2f64.sqrt();
        let mut expected = Vec::new();
        for q in [[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]] {
            let scores =
                [[0.5, 1.0], [1.0, -1.0], [2.0, 0.0f64]].map(|k: [f64; 2]| ((q[0] * k[0] + q[1] * k[1]) * scale).exp());
            let sum: f64 = scores.iter().sum();
            for column in [[1.0, 3.0, 5.0], [2.0, 4.0, -6.0]] {
                expected.push((0..3).map(|i| scores[i] * column[i]).sum::<f64>() / sum);
            }
        }
        for (found, expected) in values(attention(q, k, v)).iter().zip(expected) {
            assert!(
                (f64::from(*found) - expected).abs() <= 1e-6,
                "{found} is not {expected}"
            );
        }
    }

    #[test]
    fn chunks_of_rows_do_not_change_the_result() {
        let device = Device::flex();
        let random = || Tensor::<3>::random([2, 37, 8], Distribution::Normal(0.0, 2.0), &device);
        let (q, k, v) = (random(), random(), random());
        let whole = values(attention_in_chunks(q.clone(), k.clone(), v.clone(), 37));
        for chunk in [1, 5, 36, 100] {
            let chunked = values(attention_in_chunks(q.clone(), k.clone(), v.clone(), chunk));
            for (chunked, whole) in chunked.iter().zip(&whole) {
                assert!(
                    (chunked - whole).abs() <= 1e-5,
                    "chunk {chunk}: {chunked} is not {whole}"
                );
            }
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let device = Device::flex();
        let q = Tensor::<3>::full([1, 4, 4], 300.0, &device);
        let v = Tensor::<3>::full([1, 4, 4], 3.0, &device);
        assert!(
            values(attention(q.clone(), q, v))
                .iter()
                .all(|v| (v - 3.0).abs() <= 1e-6)
        );
    }
}

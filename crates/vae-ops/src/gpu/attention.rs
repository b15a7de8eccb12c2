//! Exact attention of one wide head, in chunks of queries: scores, softmax, product with the values.

use cubecl::{ir::FloatKind, prelude::*, server::Handle};

use super::{
    gemm::{Engine, Gemm, Operand, Window},
    softmax::softmax,
};

/// Bytes of f32 scores that exist at a time.
const SCORES_BYTES: usize = 128 << 20;

/// Attention over the tokens of each image.
pub(super) struct Attention<'a> {
    pub engine: Engine,
    pub dtype: ElemType,
    pub tokens: usize,
    pub channels: usize,
    /// `[3 * channels, channels]`: queries, keys, and values with the output's projection folded in.
    pub projection: &'a Handle,
    pub projection_bias: &'a Handle,
    pub bias: &'a Handle,
}

impl Attention<'_> {
    /// Enqueues `out = softmax(q k^T / sqrt(channels)) v + bias + x` for every image.
    pub fn launch(&self, client: &Client, batch: usize, normalized: &Handle, x: &Handle, out: &Handle) {
        let Self {
            dtype,
            tokens,
            channels,
            ..
        } = *self;
        let size = dtype.size();
        // Rows of probabilities are padded to whole loads.
        let stride = tokens.next_multiple_of(8);
        let chunk = (SCORES_BYTES / size_of::<f32>() / stride).clamp(1, tokens);
        let query_key = client.empty(tokens * 2 * channels * size);
        let values = client.empty(channels * stride * size);
        let scores = client.empty(chunk * stride * size_of::<f32>());
        let probabilities = client.empty(chunk * stride * size);
        let sums = client.empty(chunk * size_of::<f32>());

        for image in 0..batch {
            let pixels = Operand {
                handle: normalized,
                offset: image * tokens * channels,
                stride: channels,
            };
            Gemm {
                bias: Some(self.projection_bias),
                ..self.product(
                    [tokens, channels, 2 * channels],
                    pixels,
                    Operand::packed(self.projection, channels),
                    Operand::packed(&query_key, 2 * channels),
                )
            }
            .launch(client);
            // The other way round: tokens are the columns, so that values are contiguous along the tokens.
            let value_weight = Operand {
                handle: self.projection,
                offset: 2 * channels * channels,
                stride: channels,
            };
            Gemm {
                weight_rows: tokens,
                ..self.product(
                    [channels, channels, stride],
                    value_weight,
                    pixels,
                    Operand::packed(&values, stride),
                )
            }
            .launch(client);

            for first in (0..tokens).step_by(chunk) {
                let rows = chunk.min(tokens - first);
                let part = |offset| Operand {
                    handle: &query_key,
                    offset,
                    stride: 2 * channels,
                };
                let queries = part(first * 2 * channels);
                Gemm {
                    out_dtype: ElemType::Float(FloatKind::F32),
                    ..self.product(
                        [rows, channels, tokens],
                        queries,
                        part(channels),
                        Operand::packed(&scores, stride),
                    )
                }
                .launch(client);
                let scale = 1.0 / (channels as f32).sqrt();
                softmax(
                    client,
                    &scores,
                    &probabilities,
                    &sums,
                    [rows, tokens, stride],
                    scale,
                    dtype,
                );
                let mixed = Operand {
                    handle: out,
                    offset: (image * tokens + first) * channels,
                    stride: channels,
                };
                Gemm {
                    bias: Some(self.bias),
                    divisor: Some(&sums),
                    residual: Some(x),
                    ..self.product(
                        [rows, stride, channels],
                        Operand::packed(&probabilities, stride),
                        Operand::packed(&values, stride),
                        mixed,
                    )
                }
                .launch(client);
            }
        }
    }

    /// `out[row][column] = sum over k of x[row][k] * weight[column][k]` for `[rows, k, columns]`.
    fn product<'a>(
        &self,
        [rows, k, columns]: [usize; 3],
        x: Operand<'a>,
        weight: Operand<'a>,
        out: Operand<'a>,
    ) -> Gemm<'a> {
        Gemm {
            window: Window::POINT,
            engine: self.engine,
            dtype: self.dtype,
            out_dtype: self.dtype,
            batch: 1,
            height: 1,
            width: rows,
            channels_in: k,
            channels_out: columns,
            x,
            weight,
            weight_rows: columns,
            bias: None,
            divisor: None,
            residual: None,
            out,
        }
    }
}

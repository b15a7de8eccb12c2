use burn::{
    backend::{TensorMetadata, cubecl::dtype_to_storage_type, tensor::FloatTensor},
    tensor::{DType, FloatDType, Shape},
};
use burn_cubecl::{
    CubeBackend, kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use cubecl::ir::ElemType;

#[cfg(feature = "hopper")]
use super::hopper::{Half, HopperAttention, HopperConv, HopperNarrowConv};
use super::{
    attention::Attention,
    gemm::{Engine, Gemm, Operand, Window},
    group_norm::{self, MOMENTS, Moments},
    launch::Rows,
    pack::pack,
};
use crate::fused::{ConvKind, ConvOutput, ConvSpec, FusedOps, NormSpec, OptionalTensor};
use crate::support::{ConvEngine, GpuProfile};

impl FusedOps for CubeBackend {
    fn pack_conv_weight(weight: FloatTensor<Self>, kind: ConvKind, dtype: FloatDType) -> FloatTensor<Self> {
        let weight = into_contiguous(weight);
        let [channels_out, channels_in, _, _] = dims(&weight);
        let rows = kind.phases() * kind.phases() * channels_out;
        let depth = kind.taps() * kind.taps() * channels_in;
        let packed = empty_like(&weight, Shape::new([rows, depth]), dtype.into());
        pack(
            &weight.client,
            kind,
            [channels_out, channels_in],
            (&weight.handle, elem(weight.dtype)),
            (&packed.handle, elem(packed.dtype)),
        );
        packed
    }

    fn fused_conv(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        residual: OptionalTensor<Self>,
        spec: ConvSpec,
    ) -> ConvOutput<Self> {
        let residual = match residual {
            OptionalTensor::Some(residual) => Some(into_contiguous(residual)),
            OptionalTensor::None => None,
        };
        conv(x, weight, bias, residual, spec)
    }

    fn fused_group_norm(
        x: FloatTensor<Self>,
        moments: OptionalTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        spec: NormSpec,
    ) -> FloatTensor<Self> {
        let x = into_contiguous(x);
        let (weight, bias) = (into_contiguous(weight), into_contiguous(bias));
        // Nobody else has it: the result may take its place.
        let in_place = x.can_mut();
        let y = match in_place {
            true => x.clone(),
            false => empty_like(&x, x.shape(), x.dtype),
        };
        let rows = rows(&x);
        let moments = match moments {
            OptionalTensor::Some(moments) => Moments {
                parts: moments.shape()[1],
                handle: moments.handle,
            },
            OptionalTensor::None => group_norm::channel_moments(&x.client, &rows),
        };
        group_norm::group_norm(
            &x.client,
            &rows,
            &moments,
            [&weight.handle, &bias.handle],
            spec,
            (!in_place).then_some(&y.handle),
            GpuProfile::of(&x.client).sm_90a,
        );
        y
    }

    fn channel_moments(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = into_contiguous(x);
        let rows = rows(&x);
        let Moments { handle, parts } = group_norm::channel_moments(&x.client, &rows);
        let shape = Shape::new([rows.batch, parts, MOMENTS, rows.channels]);
        CubeTensor::new_contiguous(x.client.clone(), x.device.clone(), shape, handle, DType::F32)
    }

    fn fused_attention(
        x: FloatTensor<Self>,
        normalized: FloatTensor<Self>,
        projection: FloatTensor<Self>,
        projection_bias: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, normalized) = (into_contiguous(x), into_contiguous(normalized));
        let (projection_bias, bias) = (into_contiguous(projection_bias), into_contiguous(bias));
        let [batch, height, width, channels] = dims(&x);
        let out = empty_like(&x, x.shape(), x.dtype);
        let profile = GpuProfile::of(&x.client);
        let engine = match profile.attention_engine(x.dtype, channels).0 {
            #[cfg(feature = "hopper")]
            ConvEngine::Hopper => {
                let spec = ConvSpec {
                    kind: ConvKind::Point,
                    channels_out: 3 * channels,
                    measure: false,
                };
                let projected = conv(normalized, projection, projection_bias, None, spec).y;
                for image in 0..batch {
                    let tokens = height * width;
                    let part = |index: usize| Operand {
                        handle: &projected.handle,
                        offset: (image * tokens * 3 + index) * channels,
                        stride: 3 * channels,
                    };
                    let rows = |handle| Operand {
                        handle,
                        offset: image * tokens * channels,
                        stride: channels,
                    };
                    HopperAttention {
                        dtype: elem(x.dtype),
                        half: half(x.dtype),
                        tokens,
                        channels,
                        query: part(0),
                        key: part(1),
                        value: part(2),
                        bias: &bias.handle,
                        residual: rows(&x.handle),
                        out: rows(&out.handle),
                        multiprocessors: profile.multiprocessors,
                    }
                    .launch(&x.client);
                }
                return out;
            }
            ConvEngine::TensorCore => Engine::TensorCore,
            _ => Engine::MultiplyAdd,
        };
        let attention = Attention {
            engine,
            dtype: elem(x.dtype),
            tokens: height * width,
            channels,
            projection: &projection.handle,
            projection_bias: &projection_bias.handle,
            bias: &bias.handle,
        };
        attention.launch(&x.client, batch, &normalized.handle, &x.handle, &out.handle);
        out
    }
}

fn conv(
    x: CubeTensor,
    weight: CubeTensor,
    bias: CubeTensor,
    residual: Option<CubeTensor>,
    spec: ConvSpec,
) -> ConvOutput<CubeBackend> {
    let (x, bias) = (into_contiguous(x), into_contiguous(bias));
    let [batch, height, width, channels_in] = dims(&x);
    let channels_out = spec.channels_out;
    let (phases, taps) = (spec.kind.phases(), spec.kind.taps());
    let y = empty_like(
        &x,
        Shape::new([batch, phases * height, phases * width, channels_out]),
        x.dtype,
    );
    let profile = GpuProfile::of(&x.client);
    let residual = residual.as_ref().map(|residual| &residual.handle);
    let engine = match profile.conv_engine(x.dtype, channels_in, channels_out).0 {
        #[cfg(feature = "hopper")]
        ConvEngine::Hopper if channels_out.is_multiple_of(8) && (phases == 1 || residual.is_none()) => {
            let moments = HopperConv {
                dtype: elem(x.dtype),
                half: half(x.dtype),
                taps: taps as u32,
                batch,
                height,
                width,
                channels_in,
                channels_out,
                x: &x.handle,
                weight: &weight.handle,
                bias: &bias.handle,
                residual,
                measure: spec.measure,
                out: &y.handle,
                multiprocessors: profile.multiprocessors,
            }
            .launch(&x.client);
            let moments = match moments {
                None => OptionalTensor::None,
                Some(Moments { handle, parts }) => {
                    let shape = Shape::new([batch, parts, MOMENTS, channels_out]);
                    let (client, device) = (x.client.clone(), x.device.clone());
                    OptionalTensor::Some(CubeTensor::new_contiguous(client, device, shape, handle, DType::F32))
                }
            };
            return ConvOutput { y, moments };
        }
        #[cfg(feature = "hopper")]
        ConvEngine::Hopper if channels_out < 8 && phases == 1 && residual.is_none() => {
            HopperNarrowConv {
                dtype: elem(x.dtype),
                half: half(x.dtype),
                taps: taps as u32,
                batch,
                height,
                width,
                channels_in,
                channels_out,
                x: &x.handle,
                weight: &weight.handle,
                bias: &bias.handle,
                out: &y.handle,
                multiprocessors: profile.multiprocessors,
            }
            .launch(&x.client);
            return ConvOutput {
                y,
                moments: OptionalTensor::None,
            };
        }
        ConvEngine::TensorCore | ConvEngine::Hopper => Engine::TensorCore,
        _ => Engine::MultiplyAdd,
    };
    Gemm {
        window: Window {
            taps: taps as u32,
            phases: phases as u32,
        },
        engine,
        dtype: elem(x.dtype),
        out_dtype: elem(x.dtype),
        batch,
        height,
        width,
        channels_in,
        channels_out,
        x: Operand::packed(&x.handle, channels_in),
        weight: Operand::packed(&weight.handle, taps * taps * channels_in),
        weight_rows: channels_out,
        bias: Some(&bias.handle),
        divisor: None,
        residual,
        out: Operand::packed(&y.handle, channels_out),
    }
    .launch(&x.client);
    ConvOutput {
        y,
        moments: OptionalTensor::None,
    }
}

#[cfg(feature = "hopper")]
fn half(dtype: DType) -> Half {
    match dtype {
        DType::F16 => Half::F16,
        _ => Half::Bf16,
    }
}

fn elem(dtype: DType) -> ElemType {
    dtype_to_storage_type(dtype)
}

fn dims<const D: usize>(tensor: &CubeTensor) -> [usize; D] {
    tensor.shape().dims()
}

/// Channels are the last dimension, the first is the batch.
fn rows(x: &CubeTensor) -> Rows {
    let shape = x.shape();
    let (batch, channels) = (shape[0], shape[shape.num_dims() - 1]);
    Rows {
        handle: x.handle.clone(),
        dtype: elem(x.dtype),
        batch,
        rows: shape.num_elements() / (batch * channels),
        channels,
    }
}

fn empty_like(x: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape, dtype)
}

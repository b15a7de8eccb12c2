use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor},
    tensor::{DType, Tensor, module, ops::ConvOptions},
};

/// Convolution of `[batch, channels_in, height, width]` with `[channels_out, channels_in, k, k]`, stride 1, padding `k / 2`,
/// by Burn's own kernels, with sums in f32 whatever the type.
///
/// Burn's default on GPUs without autotune adds up in the tensor's own type, which in bf16 costs five times PyTorch's error
/// on real pictures. Here half precision takes the implicit GEMM of cubek, Burn's kernel library, on tensor cores, else
/// Burn's direct kernel in f32.
pub fn conv2d(x: Tensor<4>, weight: Tensor<4>, bias: Tensor<1>) -> Tensor<4> {
    let padding = weight.dims()[2] / 2;
    conv2d_padded(x, weight, bias, [padding, padding])
}

/// [`conv2d`] with other padding of rows and of columns: none for the rows of a band that brings its neighbours along.
pub fn conv2d_padded(x: Tensor<4>, weight: Tensor<4>, bias: Tensor<1>, padding: [usize; 2]) -> Tensor<4> {
    // Only GPUs need it; gradients and other backends are Burn's own business.
    if x.dtype() == DType::F32 || !crate::support::is_gpu(&x.device()) {
        return module::conv2d(x, weight, Some(bias), ConvOptions::new([1, 1], padding, [1, 1], 1));
    }
    let (weight, bias) = (weight.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(Dispatch::conv2d_f32_sums(x.into_dispatch(), weight, bias, padding))
}

/// What [`conv2d_padded`] asks of a GPU's backend.
#[backend_extension(Cube: cfg(feature = "gpu"))]
pub trait StockOps: Backend {
    /// [`conv2d_padded`] of half precision.
    fn conv2d_f32_sums(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        padding: [usize; 2],
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
mod gpu {
    use burn::{
        backend::{
            cubecl::dtype_to_storage_type,
            ops::{ConvOptions, FloatTensorOps, ModuleOps},
            tensor::FloatTensor,
        },
        tensor::FloatDType,
    };
    use burn_cubecl::{
        CubeBackend,
        ops::{numeric::empty_device_dtype, permute_nchw_to_nhwc, permute_nhwc_to_nchw},
        tensor::CubeTensor,
    };
    use cubek::{
        convolution::{
            AcceleratedTileKind, ConvAlgorithm, ConvolutionArgs, ConvolutionInputs, Strategy,
            components::ConvSetupError, launch_ref,
        },
        matmul::definition::{MatmulElems, MatmulGlobalElems},
        std::InputBinding,
    };

    use super::StockOps;
    use crate::support::{ConvEngine, GpuProfile};

    impl StockOps for CubeBackend {
        fn conv2d_f32_sums(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            padding: [usize; 2],
        ) -> FloatTensor<Self> {
            if GpuProfile::of(&x.client).product_engine(x.dtype).0 == ConvEngine::TensorCore
                && let Ok(y) = implicit_gemm(&x, &weight, &bias, padding)
            {
                return y;
            }
            let options = ConvOptions::new([1, 1], padding, [1, 1], 1);
            let dtype = FloatDType::from(x.dtype);
            let wide = |tensor| Self::float_cast(tensor, FloatDType::F32);
            Self::float_cast(Self::conv2d(wide(x), wide(weight), Some(wide(bias)), options), dtype)
        }
    }

    /// The algorithm of cubek's that took least time on an H200 of those that took every shape: 45 ms for a FLUX.2 decode of
    /// 512x512, against 117 for its asynchronous form and 1315 for the direct kernel.
    const STRATEGY: Strategy = Strategy::Inferred {
        algorithm: ConvAlgorithm::SimpleSyncStrided,
        tile_kind: AcceleratedTileKind::Mma,
    };

    /// The convolution as a matrix product on tensor cores, if this device has one for these shapes.
    fn implicit_gemm(
        x: &CubeTensor,
        weight: &CubeTensor,
        bias: &CubeTensor,
        padding: [usize; 2],
    ) -> Result<CubeTensor, ConvSetupError> {
        let dtype = dtype_to_storage_type(x.dtype);
        let input = |tensor: &CubeTensor| InputBinding::new(permute_nchw_to_nhwc(tensor.clone()).binding(), dtype);
        let [batch, _, height, width] = x.meta.shape().dims();
        let [channels_out, _, taps, _] = weight.meta.shape().dims();
        let [height, width] = [height + 2 * padding[0] + 1 - taps, width + 2 * padding[1] + 1 - taps];
        let shape = [batch, height, width, channels_out];
        let out = empty_device_dtype(x.client.clone(), x.device.clone(), shape.into(), x.dtype);
        launch_ref::<2>(
            &STRATEGY,
            &x.client,
            ConvolutionInputs::Forward {
                input: input(x),
                weight: input(weight),
                bias: Some(InputBinding::Normal(bias.clone().binding(), dtype)),
                out: out.clone().binding(),
            },
            ConvolutionArgs {
                stride: [1, 1],
                padding,
                dilation: [1, 1],
            },
            MatmulElems::from_globals(&MatmulGlobalElems {
                lhs: dtype,
                rhs: dtype,
                out: dtype,
            }),
        )?;
        Ok(permute_nhwc_to_nchw(out))
    }
}

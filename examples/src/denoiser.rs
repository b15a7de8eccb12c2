use std::f64::consts::PI;

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
    },
    tensor::{DType, Device, Tensor, TensorData, activation::silu},
};
use half::f16;
use safetensors::SafeTensors;

use crate::Result;

/// Written by `train.py`: in f16, linear weights as Burn keeps them, names as they are here.
const WEIGHTS: &[u8] = include_bytes!("../weights/denoiser.safetensors");

/// Of FLUX.2's diffusion latents: 32 in VAE space, in patches of 2x2.
const CHANNELS: usize = 128;
const WIDTH: usize = 64;
const BLOCKS: usize = 4;
const TIME_FREQUENCIES: usize = 16;
const POSITION_FREQUENCIES: usize = 5;

/// What can be asked for: the pictures that the denoiser was trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Picture {
    /// 512x512 pixels.
    Astronaut,
    /// A cat, 448x288 pixels.
    Chelsea,
    /// 592x400 pixels.
    Coffee,
}

impl Picture {
    /// In the order of the denoiser's embedding.
    pub const ALL: [Self; 3] = [Self::Astronaut, Self::Chelsea, Self::Coffee];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Astronaut => "astronaut",
            Self::Chelsea => "chelsea",
            Self::Coffee => "coffee",
        }
    }

    /// `[1, channels, height, width]` of its diffusion latents.
    pub fn latent_shape(self) -> [usize; 4] {
        let (height, width) = match self {
            Self::Astronaut => (32, 32),
            Self::Chelsea => (18, 28),
            Self::Coffee => (25, 37),
        };
        [1, CHANNELS, height, width]
    }
}

/// Tells FLUX.2 latents from noise: a residual network of 3x3 convolutions, told the time, the position and the picture.
#[derive(Module, Debug)]
pub struct Denoiser {
    conv_in: Conv2d,
    time: Linear,
    picture: Embedding,
    blocks: Vec<Block>,
    conv_out: Conv2d,
}

#[derive(Module, Debug)]
struct Block {
    conv1: Conv2d,
    modulation: Linear,
    conv2: Conv2d,
}

/// Where each latent is in the picture, `[1, 4 * frequencies, height, width]`: the same for all steps of a sampler.
#[derive(Debug, Clone)]
pub struct PositionFeatures(Tensor<4>);

impl PositionFeatures {
    /// sin and cos of `pi 2^k y` and `pi 2^k x`, with y and x from -1 to 1 at the centres of the latents.
    pub fn new(height: usize, width: usize, device: &Device) -> Self {
        let mut features = Vec::with_capacity(4 * POSITION_FREQUENCIES * height * width);
        let centre = |i: usize, count: usize| (i as f64 + 0.5) / count as f64 * 2.0 - 1.0;
        for k in 0..POSITION_FREQUENCIES {
            for is_x in [false, true] {
                for function in [f64::sin, f64::cos] {
                    for row in 0..height {
                        for column in 0..width {
                            let coordinate = if is_x {
                                centre(column, width)
                            } else {
                                centre(row, height)
                            };
                            features.push(function(PI * f64::from(1 << k) * coordinate) as f32);
                        }
                    }
                }
            }
        }
        let shape = [1, 4 * POSITION_FREQUENCIES, height, width];
        Self(Tensor::from_data(
            TensorData::new(features, shape),
            (device, DType::F32),
        ))
    }
}

impl Denoiser {
    /// The trained denoiser.
    ///
    /// # Errors
    /// When the weights that were compiled in are not those of this module.
    pub fn load(device: &Device) -> Result<Self> {
        let mut weights = Weights {
            tensors: SafeTensors::deserialize(WEIGHTS)?,
            path: Vec::new(),
            applied: 0,
            failed: Vec::new(),
        };
        let denoiser = Self::new(device).map(&mut weights);
        if !weights.failed.is_empty() || weights.applied != weights.tensors.len() {
            let failed = weights.failed.join(", ");
            return Err(format!("the denoiser's weights do not fit ({failed}); run train.py again").into());
        }
        Ok(denoiser)
    }

    /// Random weights.
    pub fn new(device: &Device) -> Self {
        let block = || Block {
            conv1: conv([WIDTH, WIDTH], 3, device),
            modulation: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            conv2: conv([WIDTH, WIDTH], 3, device),
        };
        Self {
            conv_in: conv([CHANNELS + 4 * POSITION_FREQUENCIES, WIDTH], 1, device),
            time: LinearConfig::new(2 * TIME_FREQUENCIES, WIDTH).init(device),
            picture: EmbeddingConfig::new(Picture::ALL.len(), WIDTH).init(device),
            blocks: (0..BLOCKS).map(|_| block()).collect(),
            conv_out: conv([WIDTH, CHANNELS], 1, device),
        }
    }

    /// The data, as far as it can be told from `x = (1 - t) data + t noise`.
    ///
    /// # Shapes
    /// - `x`: `[batch, 128, height, width]` in f32
    /// - returns the same
    pub fn data(&self, x: Tensor<4>, t: f32, picture: Picture, position: &PositionFeatures) -> Tensor<4> {
        let device = x.device();
        let batch = x.dims()[0];
        let time = Tensor::from_data(time_features(t), (&device, DType::F32));
        let index = picture as usize;
        let picture = self.picture.weight.val().slice([index..index + 1, 0..WIDTH]);
        let condition = silu(self.time.forward(time) + picture);

        let position = position.0.clone().repeat_dim(0, batch);
        let mut h = self.conv_in.forward(Tensor::cat(vec![x, position], 1));
        for block in &self.blocks {
            h = block.forward(h, condition.clone());
        }
        self.conv_out.forward(silu(h))
    }
}

impl Block {
    fn forward(&self, h: Tensor<4>, condition: Tensor<2>) -> Tensor<4> {
        let modulation = self.modulation.forward(condition).reshape([1, 2 * WIDTH, 1, 1]);
        let scale = modulation.clone().narrow(1, 0, WIDTH).add_scalar(1.0);
        let shift = modulation.narrow(1, WIDTH, WIDTH);
        let x = self.conv1.forward(silu(h.clone()));
        h + self.conv2.forward(silu(x * scale + shift))
    }
}

/// A convolution that keeps the size.
fn conv(channels: [usize; 2], kernel: usize, device: &Device) -> Conv2d {
    let padding = kernel / 2;
    Conv2dConfig::new(channels, [kernel, kernel])
        .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
        .init(device)
}

/// sin and cos of t times frequencies from 1 to 1000 in equal ratios: `[1, 2 * frequencies]`.
fn time_features(t: f32) -> TensorData {
    let angles = (0..TIME_FREQUENCIES).map(|k| {
        let exponent = k as f64 / (TIME_FREQUENCIES - 1) as f64;
        f64::from(t) * 1000f64.powf(exponent)
    });
    let features = angles.clone().map(f64::sin).chain(angles.map(f64::cos));
    TensorData::new(
        features.map(|x| x as f32).collect::<Vec<_>>(),
        [1, 2 * TIME_FREQUENCIES],
    )
}

/// Gives each parameter the tensor of its path.
struct Weights<'a> {
    tensors: SafeTensors<'a>,
    path: Vec<String>,
    applied: usize,
    failed: Vec<String>,
}

impl ModuleMapper for Weights<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.path.join(".");
        let tensor = self.tensors.tensor(&name).ok();
        let fits = |tensor: &safetensors::tensor::TensorView<'_>| {
            tensor.dtype() == safetensors::Dtype::F16 && tensor.shape() == param.lazy_shape().to_vec()
        };
        let Some(tensor) = tensor.filter(fits) else {
            self.failed.push(name);
            return param;
        };
        self.applied += 1;
        let values = tensor.data().as_chunks().0.iter();
        let values: Vec<f32> = values.map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect();
        let data = TensorData::new(values, tensor.shape().to_vec());
        let value = Tensor::from_data(data, (&param.lazy_device(), DType::F32));
        let id = param.id;
        param.transform_for_load(value, id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `x`, `t` and `data` of a batch with one of each picture.
    const EXPECTED: &[u8] = include_bytes!("../weights/expected.safetensors");

    fn tensor(name: &str) -> (Vec<usize>, Vec<f32>) {
        let file = SafeTensors::deserialize(EXPECTED).unwrap();
        let view = file.tensor(name).unwrap();
        let values = view.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        (view.shape().to_vec(), values.collect())
    }

    #[test]
    fn estimates_are_those_of_pytorch_at_every_time_and_on_wide_latents() {
        let device = Device::flex();
        let denoiser = Denoiser::load(&device).unwrap();
        let (shape, x) = tensor("x");
        let (height, width) = (shape[2], shape[3]);
        let x = Tensor::<4>::from_data(TensorData::new(x, shape), (&device, DType::F32));
        let position = PositionFeatures::new(height, width, &device);
        let expected = tensor("data").1;
        for (i, (&t, picture)) in tensor("t").1.iter().zip(Picture::ALL).enumerate() {
            let data = denoiser.data(x.clone().narrow(0, i, 1), t, picture, &position);
            let found: Vec<f32> = data.into_data().try_into_vec().unwrap();
            for (found, expected) in found.iter().zip(&expected[i * found.len()..][..found.len()]) {
                assert!(
                    (found - expected).abs() <= 1e-4,
                    "{picture:?}: {found} is not {expected}"
                );
            }
        }
    }
}

use burn::tensor::{DType as BurnDType, Device, Tensor, TensorData};
use vae_blocks::{LatentMap, Latents, Quality, VaeModel, device_name, unpatchify2x2};
use vae_io::{Error, Image, LatentSpace, PreviewProjection, PreviewSample, Result};

use crate::{Loaded, VaeDecoder, VaeModule};

/// Approximate pictures of latents, in the size of the latents, in less than a millisecond: for looking at every step of a
/// sampler.
///
/// Each latent's colour is a linear function of its channels ([`PreviewProjection`]), fitted once per model with
/// `cargo xtask fit-preview`. Colours and composition are right; there is no detail smaller than a latent, and what the
/// decoder makes of neighbours is not seen. The model's scaling or normalisation is folded into the projection, so that a
/// preview is one small matrix product.
///
/// In the middle of sampling, preview the sampler's estimate of the finished latents (`x - t * velocity` for a rectified flow)
/// rather than the noisy latents themselves.
#[derive(Debug, Clone)]
pub struct Preview {
    device: Device,
    latent_channels: usize,
    /// For each space and layout; the reason where the family has no such latents.
    maps: [[Result<AffineMap, String>; 3]; 2],
}

/// How latents are laid out: the order of [`Preview::maps`].
#[derive(Debug, Clone, Copy)]
enum Layout {
    Pixels,
    Patches,
    Tokens,
}

impl Layout {
    const ALL: [Self; 3] = [Self::Pixels, Self::Patches, Self::Tokens];

    /// Latents of one pixel or one patch that all are `value`.
    fn uniform(self, value: f32, channels: usize, device: &Device) -> Latents {
        let options = (device, BurnDType::F32);
        match self {
            Self::Pixels => Latents::diffusion(Tensor::full([1, channels, 1, 1], value, options)),
            Self::Patches => Latents::diffusion(Tensor::full([1, 4 * channels, 1, 1], value, options)),
            Self::Tokens => Latents::tokens(Tensor::full([1, 1, 4 * channels], value, options), 1, 1),
        }
    }
}

/// The order of [`Preview::maps`].
const SPACES: [LatentSpace; 2] = [LatentSpace::Diffusion, LatentSpace::Vae];

/// `weight * x + bias`, from the channels of a map to the colours of its pixels or patches.
#[derive(Debug, Clone)]
struct AffineMap {
    /// `[1, colours, channels]`, f32
    weight: Tensor<3>,
    /// `[1, colours, 1]`, f32
    bias: Tensor<3>,
}

impl Preview {
    /// Previews of the decoder's latents, on its device.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the projection is for latents of other channels, [`Error::DeviceFailed`].
    pub fn new(decoder: &VaeDecoder, projection: &PreviewProjection) -> Result<Self> {
        let model = model(decoder);
        let device = model.device();
        let latent_channels = model.decoder_config().latent_channels;
        projection.check_channels(latent_channels)?;
        let map = |space, layout: Layout| {
            let in_vae_space = |value| {
                let latents = layout.uniform(value, latent_channels, &device).in_space(space);
                model.to_vae_space(latents)
            };
            match (in_vae_space(0.0), in_vae_space(1.0)) {
                (Ok(zero), Ok(one)) => Ok(Ok(AffineMap::new(projection, read(zero)?, read(one)?, &device))),
                (Err(Error::InvalidLatents { reason, .. }), _) => Ok(Err(reason)),
                (Err(error), _) | (_, Err(error)) => Err(error),
            }
        };
        let layouts = |space| -> Result<[Result<AffineMap, String>; 3]> {
            let [pixels, patches, tokens] = Layout::ALL.map(|layout| map(space, layout));
            Ok([pixels?, patches?, tokens?])
        };
        let [diffusion, vae] = SPACES.map(layouts);
        Ok(Self {
            maps: [diffusion?, vae?],
            latent_channels,
            device,
        })
    }

    /// An approximate picture of latents, in every space and layout that the decoder takes: `[batch, 3, height, width]` in
    /// f32, clamped to -1..1, a pixel for each latent in VAE space (an eighth of a full-size model's image).
    ///
    /// Enqueues the work and returns without synchronising.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the latents do not fit the model or are on another device.
    pub fn image(&self, latents: Latents) -> Result<Tensor<4>> {
        let dims = latents.dims();
        if latents.device() != self.device {
            let reason = format!(
                "they are on {} and the preview is on {}",
                device_name(&latents.device()),
                device_name(&self.device)
            );
            return Err(Error::invalid_latents(&dims, reason));
        }
        let (space, are_tokens) = (latents.space(), latents.are_tokens());
        let (layout, map) = match latents.into_map(self.latent_channels)? {
            LatentMap::Pixels(map) => (Layout::Pixels, map),
            LatentMap::Patches(map) if are_tokens => (Layout::Tokens, map),
            LatentMap::Patches(map) => (Layout::Patches, map),
        };
        let affine = self.maps[usize::from(space == LatentSpace::Vae)][layout as usize].as_ref();
        let affine = affine.map_err(|reason| Error::invalid_latents(&dims, reason))?;
        let colours = affine.apply(map);
        Ok(match layout {
            Layout::Pixels => colours,
            Layout::Patches | Layout::Tokens => unpatchify2x2(colours),
        })
    }
}

impl AffineMap {
    /// Of latents whose channels become `zero` in VAE space where they are 0, and `one` where they are 1: `[C]` for a pixel,
    /// `[C, 2, 2]` for a patch. Both families scale and shift each channel by itself.
    fn new(projection: &PreviewProjection, zero: Vec<f32>, one: Vec<f32>, device: &Device) -> Self {
        let channels = zero.len();
        let patch = channels / projection.weight.len();
        // Colours are laid out as the channels are: colour, then row and column of the patch.
        let mut weight = vec![0f32; 3 * patch * channels];
        let mut bias: Vec<f32> = projection.bias.iter().flat_map(|&bias| vec![bias; patch]).collect();
        for (channel, (&zero, &one)) in zero.iter().zip(&one).enumerate() {
            let pixel = channel % patch;
            for (colour, &factor) in projection.weight[channel / patch].iter().enumerate() {
                let row = colour * patch + pixel;
                weight[row * channels + channel] = factor * (one - zero);
                bias[row] += factor * zero;
            }
        }
        let options = (device, BurnDType::F32);
        Self {
            weight: Tensor::from_data(TensorData::new(weight, [1, 3 * patch, channels]), options),
            bias: Tensor::from_data(TensorData::new(bias, [1, 3 * patch, 1]), options),
        }
    }

    fn apply(&self, map: Tensor<4>) -> Tensor<4> {
        let [batch, channels, height, width] = map.dims();
        let columns = map.cast(BurnDType::F32).reshape([batch, channels, height * width]);
        // The weight is repeated rather than broadcast: it is small, and batched products take equal batches everywhere.
        let colours = self.weight.clone().repeat_dim(0, batch).matmul(columns) + self.bias.clone();
        let rows = colours.dims()[1];
        colours.clamp(-1.0, 1.0).reshape([batch, rows, height, width])
    }
}

impl Loaded {
    /// Previews, if the weights came with a projection: the file [`PreviewProjection::path_beside`] them.
    ///
    /// # Errors
    /// Those of [`PreviewProjection::read`] and [`Preview::new`].
    pub fn preview(&self) -> Result<Option<Preview>> {
        let Some(weights) = self.files.first() else {
            return Ok(None);
        };
        let path = PreviewProjection::path_beside(weights);
        if !path.is_file() {
            return Ok(None);
        }
        let preview = Preview::new(&self.decoder, &PreviewProjection::read(&path)?).map_err(|error| match error {
            Error::InvalidLatents { reason, .. } => Error::invalid_file(&path, "preview projection", reason),
            error => error,
        });
        preview.map(Some)
    }
}

/// Decodes a picture's latents (a batch of one) and pairs them with the averaged decode, for [`PreviewProjection::fit`].
///
/// # Errors
/// Those of [`VaeDecoder::decode`], [`Error::NonFinite`], [`Error::DeviceFailed`].
pub fn preview_sample(decoder: &VaeDecoder, latents: Latents, quality: Quality) -> Result<PreviewSample> {
    let z = model(decoder).to_vae_space(latents.clone())?;
    let image = decoder.decode(latents, quality)?;
    let read = |tensor: Tensor<4>| Ok(Image::new(tensor.dims(), read(tensor)?));
    PreviewSample::new(read(z)?, &read(image)?)
}

fn model(decoder: &VaeDecoder) -> &dyn VaeModel {
    match decoder.module() {
        VaeModule::AutoencoderKl(module) => module,
        VaeModule::Flux2(module) => module,
    }
}

/// The values of a tensor, as soon as they exist.
fn read(tensor: Tensor<4>) -> Result<Vec<f32>> {
    let device = device_name(&tensor.device());
    let failed = |reason: String| Error::DeviceFailed { device, reason };
    let data = tensor.try_into_data_dtype(BurnDType::F32);
    data.map_err(|error| error.to_string())
        .and_then(|data| data.try_into_vec().map_err(|error| error.to_string()))
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AutoencoderKl, AutoencoderKlConfig, AutoencoderKlFlux2, Flux2Config};

    /// Weights that are different for each channel and colour.
    fn projection(channels: usize) -> PreviewProjection {
        let weight = |c: usize| [0, 1, 2].map(|colour| ((c * 3 + colour) % 7) as f32 / 64.0 - 0.047);
        PreviewProjection {
            weight: (0..channels).map(weight).collect(),
            bias: [0.25, -0.125, 0.5],
        }
    }

    /// Numbers without a pattern, in -1..1.
    fn values<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| (i * i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        Tensor::from_data(TensorData::new(values, shape), device)
    }

    /// The projection of what the model makes of the latents, pixel by pixel.
    fn expected(decoder: &VaeDecoder, projection: &PreviewProjection, latents: Latents) -> (Vec<usize>, Vec<f32>) {
        let z = model(decoder).to_vae_space(latents).unwrap();
        let [batch, channels, height, width] = z.dims();
        let z = read(z).unwrap();
        let mut image = Vec::new();
        for b in 0..batch {
            for colour in 0..3 {
                for pixel in 0..height * width {
                    let sum: f64 = (0..channels)
                        .map(|c| {
                            let z = z[(b * channels + c) * height * width + pixel];
                            f64::from(projection.weight[c][colour]) * f64::from(z)
                        })
                        .sum();
                    image.push((sum + f64::from(projection.bias[colour])).clamp(-1.0, 1.0) as f32);
                }
            }
        }
        (vec![batch, 3, height, width], image)
    }

    fn check(decoder: &VaeDecoder, latents: Vec<Latents>) {
        let projection = projection(model(decoder).decoder_config().latent_channels);
        let preview = Preview::new(decoder, &projection).unwrap();
        for latents in latents {
            let image = preview.image(latents.clone()).unwrap();
            let (shape, expected) = expected(decoder, &projection, latents);
            assert_eq!(image.dims().to_vec(), shape);
            for (found, expected) in read(image).unwrap().into_iter().zip(expected) {
                assert!((found - expected).abs() <= 1e-4, "{found} is not {expected}");
            }
        }
    }

    #[test]
    fn a_preview_sees_latents_as_the_model_normalises_them_in_every_layout() {
        let device = Device::flex();
        let kl = |config: &AutoencoderKlConfig| VaeDecoder::from_module(AutoencoderKl::new(config, &device));
        let map = |channels| values([2, channels, 2, 3], &device);
        let tokens = |channels| Latents::tokens(values([2, 6, channels], &device), 2, 3);
        check(
            &kl(&AutoencoderKlConfig::flux1()),
            vec![Latents::diffusion(map(16)), Latents::vae(map(16)), tokens(64)],
        );
        check(
            &kl(&AutoencoderKlConfig::playground()),
            vec![Latents::diffusion(map(4))],
        );

        let mut module = AutoencoderKlFlux2::new(&Flux2Config::flux2(), &device);
        module.bn.running_mean = module.bn.running_mean.map(|mean| values(mean.dims(), &mean.device()));
        module.bn.running_var = module
            .bn
            .running_var
            .map(|var| values(var.dims(), &var.device()).square());
        check(
            &VaeDecoder::from_module(module),
            vec![
                Latents::diffusion(map(128)),
                tokens(128),
                Latents::vae(map(32)),
                Latents::vae(map(128)),
            ],
        );
    }

    #[test]
    fn what_the_decoder_refuses_has_no_preview() {
        let device = Device::flex();
        let decoder = VaeDecoder::from_module(AutoencoderKlFlux2::new(&Flux2Config::flux2(), &device));
        let preview = Preview::new(&decoder, &projection(32)).unwrap();
        let error = preview
            .image(Latents::diffusion(values([1, 32, 2, 3], &device)))
            .unwrap_err();
        assert!(
            error.to_string().contains("[1, 32, 2, 3]") && error.to_string().contains("VAE space"),
            "{error}"
        );
        let error = Preview::new(&decoder, &projection(16)).unwrap_err().to_string();
        assert!(error.contains("for 16 channels"), "{error}");
    }
}

//! Load, decode, save: the whole way from a file of latents to a picture.
//!
//! ```sh
//! cargo run --release -p examples --example minimal
//! ```

use burn::tensor::DType;
use burn_vae::{DeviceName, LoadOptions, Quality, VaeDecoder, io, latents_from_file};

fn main() -> examples::Result {
    let (device, _) = DeviceName::Auto.open()?;
    let vae = VaeDecoder::load(examples::VAE, &device, &LoadOptions::default())?;

    let file = io::LatentFile::read(format!("{}/latents/coffee.safetensors", examples::VAE))?;
    let reading = io::LatentsReading::infer(&file.shape, &file.hint, &vae.config, &io::LatentsOptions::default())?;
    let latents = latents_from_file(&file, &reading, 0, &device);

    let image = vae.decoder.decode(latents, Quality::Lossless)?; // [1, 3, height, width], -1..1, on the device
    let image = io::Image::new(image.dims(), image.try_into_data_dtype(DType::F32)?.try_into_vec()?);
    image.save(0, "minimal.png", true)?;
    println!("wrote minimal.png, {}x{} pixels", image.width(), image.height());
    Ok(())
}

//! One decoder shared by two threads, with two qualities at once.
//!
//! A decoder is `Send + Sync`, and the quality is an argument of each decode: a fast draft and a lossless final picture need
//! one copy of the weights (and the folded copy of `High`).
//!
//! ```sh
//! cargo run --release -p examples --example threads
//! ```

use std::{sync::Arc, thread, time::Instant};

use burn::tensor::{DType, Tensor};
use burn_vae::{DeviceName, Latents, LoadOptions, Quality, VaeDecoder, io};
use examples::{Denoiser, Picture, Result, sample};

fn main() -> Result {
    let (device, name) = DeviceName::Auto.open()?;
    let vae = Arc::new(VaeDecoder::load(examples::VAE, &device, &LoadOptions::default())?.decoder);
    device.seed(0);
    let noise = Tensor::random(
        Picture::Chelsea.latent_shape(),
        burn::tensor::Distribution::Normal(0.0, 1.0),
        (&device, DType::F32),
    );
    let latents = sample(&Denoiser::load(&device)?, noise, Picture::Chelsea, 8, &mut |_| {});

    // Cloning a tensor copies a handle, not the values: both threads read the same latents on the device.
    let decode = |quality: Quality| {
        let (vae, latents) = (Arc::clone(&vae), Latents::diffusion(latents.clone()));
        thread::spawn(move || -> Result<io::Image, String> {
            let started = Instant::now();
            let image = vae.decode(latents, quality).map_err(|error| error.to_string())?;
            let shape = image.dims();
            let data = image
                .try_into_data_dtype(DType::F32)
                .map_err(|error| error.to_string())?;
            println!("{quality} on {name}: {:.0} ms", started.elapsed().as_secs_f64() * 1e3);
            Ok(io::Image::new(
                shape,
                data.try_into_vec().map_err(|error| error.to_string())?,
            ))
        })
    };
    let [lossless, high] = Quality::ALL.map(decode);
    let join = |thread: thread::JoinHandle<Result<io::Image, String>>| -> Result<io::Image> {
        Ok(thread.join().map_err(|_| "a thread panicked")??)
    };
    let (lossless, high) = (join(lossless)?, join(high)?);
    let metrics = io::Metrics::of_images(&high, &lossless, 0)?;
    println!("high against lossless: PSNR {:.1} dB", metrics.psnr_db);
    Ok(())
}

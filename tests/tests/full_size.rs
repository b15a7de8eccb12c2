//! `Quality::High` of full-size models on CUDA, in bf16: it errs no more than Lossless.
//!
//! Weights are random, so nothing is read. The truth is Lossless in f32 on the same GPU, which sums in f32 as the CPU does.

use burn::tensor::{Device, FloatDType};
use burn_vae::{Flux2Config, Quality, VaeConfig};
use integration_tests::{decode, decode_with, difference, open, random};

/// Mean absolute errors of High and Lossless in bf16, for an image of this size.
fn errors(config: Flux2Config, size: usize, device: &Device) -> [f64; 2] {
    // Latents are 2x2 patches of an eighth of the image.
    let shape = [1, 4 * config.decoder.latent_channels, size / 16, size / 16];
    let config = VaeConfig::Flux2(config);
    let latents = || random::latents(shape, device);
    let truth = decode(&random::decoder(&config, device, FloatDType::F32), latents());
    let vae = random::decoder(&config, device, FloatDType::BF16);
    [Quality::High, Quality::Lossless].map(|quality| difference(&decode_with(&vae, latents(), quality), &truth).1)
}

fn errs_no_more_than_lossless(config: Flux2Config, size: usize) {
    let Some(device) = open("cuda") else { return };
    let [high, lossless] = errors(config, size, &device);
    println!(
        "{size}x{size} bf16: mean error {high:.4e} with high, {lossless:.4e} with lossless, ratio {:.4}",
        high / lossless
    );
    assert!(lossless > 0.0, "Lossless in bf16 has f32's bits");
    assert!(high <= lossless, "{:.4} of lossless's error", high / lossless);
}

#[test]
fn cuda_flux2_512_errs_no_more_than_lossless() {
    errs_no_more_than_lossless(Flux2Config::flux2(), 512);
}

#[test]
fn cuda_flux2_1024_errs_no_more_than_lossless() {
    errs_no_more_than_lossless(Flux2Config::flux2(), 1024);
}

#[test]
fn cuda_flux2_small_512_errs_no_more_than_lossless() {
    errs_no_more_than_lossless(Flux2Config::small(), 512);
}

#[test]
fn cuda_flux2_small_1024_errs_no_more_than_lossless() {
    errs_no_more_than_lossless(Flux2Config::small(), 1024);
}

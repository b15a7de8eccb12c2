//! Previews: how close they come, and that they are found beside the weights.

use std::fs;

use burn::tensor::{DType as BurnDType, Device};
use burn_vae::{DType, LoadOptions, PreviewProjection, PreviewSample, Quality, VaeDecoder, preview_sample};
use integration_tests::{PICTURES, TRAINED_MODELS, fixture, load, open, picture};
use vae_io::{Image, Metrics};

fn psnr(image: &Image, sample: &PreviewSample) -> f64 {
    Metrics::of_images(image, sample.colours(), 0).unwrap().psnr_db
}

fn samples(vae: &VaeDecoder, model: &str, device: &Device) -> Vec<PreviewSample> {
    let sample = |name: &&str| preview_sample(vae, picture(model, name, device), Quality::High).unwrap();
    PICTURES.iter().map(sample).collect()
}

#[test]
fn previews_of_pictures_that_were_not_fitted_beat_their_mean_colour_by_6_db() {
    let device = Device::flex();
    for model in TRAINED_MODELS {
        let samples = samples(&load(model, &device, DType::F32), model, &device);
        for (left_out, (name, sample)) in PICTURES.iter().zip(&samples).enumerate() {
            let others = samples.iter().enumerate().filter(|(i, _)| *i != left_out);
            let projection = PreviewProjection::fit(others.map(|(_, sample)| sample)).unwrap();
            let preview = psnr(&projection.apply(sample).unwrap(), sample);
            let mean_colour = psnr(&sample.mean_colour(), sample);
            println!("{model} {name}: {preview:.2} dB, mean colour {mean_colour:.2} dB");
            assert!(
                preview >= mean_colour + 6.0,
                "{model} {name}: {preview:.2}, {mean_colour:.2}"
            );
        }
    }
}

#[test]
fn the_shipped_projections_are_fits_to_the_fixtures_and_are_found_beside_the_weights() {
    let device = Device::flex();
    for model in TRAINED_MODELS {
        let loaded = VaeDecoder::load(fixture(model), &device, &LoadOptions::default()).unwrap();
        let preview = loaded.preview().unwrap().expect("the fixture has a projection");
        for (name, sample) in PICTURES.iter().zip(samples(&loaded.decoder, model, &device)) {
            let image = preview.image(picture(model, name, &device)).unwrap();
            let image = Image::new(
                image.dims(),
                image.into_data_dtype(BurnDType::F32).try_into_vec().unwrap(),
            );
            assert_eq!(image.shape(), sample.colours().shape());
            let (preview, mean_colour) = (psnr(&image, &sample), psnr(&sample.mean_colour(), &sample));
            assert!(
                preview >= mean_colour + 6.0,
                "{model} {name}: {preview:.2}, {mean_colour:.2}"
            );
        }
    }
}

#[test]
fn weights_without_a_projection_have_no_preview_and_a_wrong_one_is_refused() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "diffusion_pytorch_model.safetensors"] {
        fs::copy(fixture("micro-sd").join(name), folder.path().join(name)).unwrap();
    }
    let load = || VaeDecoder::load(folder.path(), &device, &LoadOptions::default()).unwrap();
    assert!(load().preview().unwrap().is_none());
    let path = folder.path().join("diffusion_pytorch_model.preview.json");
    fs::copy(fixture("flux1-tiny/ae.preview.json"), &path).unwrap();
    let error = load().preview().unwrap_err().to_string();
    assert!(
        error.contains("preview.json") && error.contains("for 16 channels"),
        "{error}"
    );
}

#[test]
fn a_preview_on_a_gpu_is_the_cpu_s() {
    let Some(gpu) = open("wgpu") else { return };
    let cpu = Device::flex();
    let image = |device: &Device| {
        let loaded = VaeDecoder::load(fixture("flux2-tiny"), device, &LoadOptions::default()).unwrap();
        let preview = loaded.preview().unwrap().unwrap();
        let image = preview.image(picture("flux2-tiny", "chelsea", device)).unwrap();
        image.into_data_dtype(BurnDType::F32).try_into_vec::<f32>().unwrap()
    };
    let (max, _) = integration_tests::difference(&image(&gpu), &image(&cpu));
    assert!(max <= 1e-4, "max abs difference {max}");
}

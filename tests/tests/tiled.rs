//! Decodes in bands of rows against whole ones, on every device that is there.

use std::{num::NonZeroUsize, ops::ControlFlow};

use burn::tensor::{DType as BurnDType, Device, Distribution, Tensor};
use burn_vae::{DType, DecodeOptions, Error, Latents, Progress, Quality, Storage, Tiling, VaeDecoder};
use integration_tests::{MICRO_MODELS, difference, load, open};

/// Channels of the VAE-space latents of a micro model.
fn channels(model: &str) -> usize {
    match model {
        "micro-sd3" => 16,
        "micro-flux2-small" => 32,
        _ => 4,
    }
}

/// Normal latents in VAE space; the same numbers on every device.
fn latents(model: &str, [batch, height, width]: [usize; 3], device: &Device) -> Latents {
    let cpu = Device::flex();
    cpu.seed(7);
    let shape = [batch, channels(model), height, width];
    let values = Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &cpu).into_data();
    Latents::vae(Tensor::from_data(values, (device, BurnDType::F32)))
}

fn rows(rows: usize) -> Tiling {
    Tiling::Rows(NonZeroUsize::new(rows).unwrap())
}

fn decode(vae: &VaeDecoder, latents: Latents, options: DecodeOptions<'_>) -> (Vec<f32>, [usize; 4]) {
    let image = vae.decode_with(latents, options).unwrap().image;
    let dims = image.dims();
    (image.into_data_dtype(BurnDType::F32).try_into_vec().unwrap(), dims)
}

/// A decode, its shape, and how many bands and layers it told of.
fn counted(vae: &VaeDecoder, latents: Latents, quality: Quality, tiling: Tiling) -> (Vec<f32>, [usize; 4], usize) {
    let mut bands = 0;
    let mut progress = |_: &Progress<'_>| {
        bands += 1;
        ControlFlow::Continue(())
    };
    let options = DecodeOptions {
        quality,
        tiling: Some(tiling),
        progress: Some(&mut progress),
        ..DecodeOptions::default()
    };
    let (image, dims) = decode(vae, latents, options);
    (image, dims, bands)
}

/// A whole decode against some in bands.
fn bands_match(vae: &VaeDecoder, model: &str, size: [usize; 3], quality: Quality, heights: &[usize], tolerance: f32) {
    let latents = || latents(model, size, &vae.device());
    let (whole, dims, _) = counted(vae, latents(), quality, Tiling::Off);
    let (_, _, layers) = counted(vae, latents(), Quality::High, Tiling::Off);
    for &height in heights {
        let (tiled, tiled_dims, bands) = counted(vae, latents(), quality, rows(height));
        let case = format!("{model} {size:?} {quality} in bands of {height}");
        assert_eq!(tiled_dims, dims, "{case}");
        let (max, mean) = difference(&tiled, &whole);
        println!("{case}: {bands} bands of {layers} layers, max {max:.2e}, mean {mean:.2e}");
        assert!(max <= tolerance, "{case}: {max:e}");
        assert!(
            bands > layers,
            "{case}: {bands} bands of {layers} layers, the height is ignored"
        );
    }
}

#[test]
fn cpu_bands_of_any_height_are_the_whole() {
    let device = Device::flex();
    for (model, _) in MICRO_MODELS {
        let vae = load(model, &device, DType::F32);
        for quality in Quality::ALL {
            for (size, heights) in [
                ([1, 33, 17], &[1, 3, 8][..]),
                ([1, 7, 50], &[1, 3]),
                ([1, 9, 5], &[8]),
                ([2, 10, 6], &[3]),
            ] {
                bands_match(&vae, model, size, quality, heights, 5e-5);
            }
        }
    }
}

#[test]
fn wgpu_high_in_bands_is_the_whole() {
    let Some(device) = open("wgpu") else { return };
    for model in ["micro-sd3", "micro-no-attention"] {
        let vae = load(model, &device, DType::F32);
        for (size, heights) in [([1, 17, 9], &[1, 3][..]), ([2, 9, 6], &[3])] {
            bands_match(&vae, model, size, Quality::High, heights, 5e-5);
        }
    }
}

/// What is kept elsewhere comes back: exactly, or in half precision with errors of its size.
fn storage_matches(device: &Device, model: &str, quality: Quality) {
    let vae = load(model, device, DType::F32);
    let image = |storage| {
        let options = DecodeOptions {
            storage: Some(storage),
            tiling: Some(rows(3)),
            ..DecodeOptions::new(quality)
        };
        decode(&vae, latents(model, [2, 13, 7], device), options).0
    };
    let expected = image(Storage::Device);
    assert_eq!(image(Storage::Host), expected, "{model} {quality} from host memory");
    assert_eq!(image(Storage::Disk), expected, "{model} {quality} from a file");
    let (max, mean) = difference(&image(Storage::Half), &expected);
    println!("{model} {quality} from half precision: max {max:.2e}, mean {mean:.2e}");
    assert!(max > 0.0, "{model} {quality}: half precision was not used");
    assert!(
        max <= 2e-2 && mean <= 2e-3,
        "{model} {quality} from half precision: {max:e}, mean {mean:e}"
    );
}

#[test]
fn cpu_bands_come_back_from_every_storage() {
    for quality in Quality::ALL {
        storage_matches(&Device::flex(), "micro-sd3", quality);
    }
}

#[test]
fn wgpu_bands_come_back_from_every_storage() {
    if let Some(device) = open("wgpu") {
        storage_matches(&device, "micro-sd3", Quality::High);
    }
}

#[test]
fn errors_at_the_borders_of_bands_are_like_all_others() {
    let device = Device::flex();
    let vae = load("micro-sd3", &device, DType::F32);
    for quality in Quality::ALL {
        let options = |tiling| DecodeOptions {
            tiling: Some(tiling),
            ..DecodeOptions::new(quality)
        };
        let size = [1, 48, 24];
        let (whole, [_, _, height, width]) = decode(&vae, latents("micro-sd3", size, &device), options(Tiling::Off));
        let (tiled, _) = decode(&vae, latents("micro-sd3", size, &device), options(rows(4)));
        // Four times the size: borders every 16 rows.
        let mut squares = [(0.0, 0usize); 2];
        for (index, (a, b)) in whole.iter().zip(&tiled).enumerate() {
            let row = index / width % height;
            let (sum, count) = &mut squares[usize::from(matches!(row % 16, 0 | 1 | 14 | 15))];
            *sum += f64::from(a - b).powi(2);
            *count += 1;
        }
        let [elsewhere, borders] = squares.map(|(sum, count)| (sum / count as f64).sqrt());
        println!("{quality}: rms {borders:.2e} at borders, {elsewhere:.2e} elsewhere");
        assert!(
            borders <= 1.25 * elsewhere,
            "{quality}: {borders:e} at borders, {elsewhere:e} elsewhere"
        );
    }
}

#[test]
fn a_decode_ends_where_it_is_cancelled() {
    let device = Device::flex();
    let vae = load("micro-sd", &device, DType::F32);
    for (quality, tiling) in [
        (Quality::Lossless, Tiling::Off),
        (Quality::Lossless, rows(2)),
        (Quality::High, Tiling::Off),
        (Quality::High, rows(2)),
    ] {
        let mut calls = 0;
        let mut progress = |_: &Progress<'_>| {
            calls += 1;
            match calls {
                4 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        let options = DecodeOptions {
            quality,
            tiling: Some(tiling),
            progress: Some(&mut progress),
            ..DecodeOptions::default()
        };
        let result = vae.decode_with(latents("micro-sd", [1, 12, 6], &device), options);
        assert!(matches!(result, Err(Error::Cancelled)), "{quality} {tiling:?}");
        assert_eq!(calls, 4, "{quality} {tiling:?}: it went on");
    }
}

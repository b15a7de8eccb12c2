//! `xtask fit-preview`: fits the projection that previews of a model's latents are made with.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use burn_vae::{
    DeviceName, Family, LoadOptions, PreviewProjection, PreviewSample, Quality, VaeDecoder, latents_from_file,
    preview_sample,
};
use vae_io::{Error, Image, LatentFile, LatentSpace, LatentsOptions, LatentsReading, Metrics};

use crate::{
    Result,
    validate::{parse_space, whole_file},
};

/// Fit the projection from latents to colours that previews are made with.
///
/// Decodes the latents of a few pictures, averages the images over the pixels of each latent, and fits colours to latents by
/// least squares. A handful of varied pictures is enough: every latent of every picture is a sample. Latents of real
/// pictures are what to take; noise or zeros decode to colours that no picture has.
///
/// Prints how close previews come to the averaged decodes. With two pictures or more, each is also previewed with a fit to
/// the others: that is what to expect of new pictures.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files of latents, as decode takes them
    #[arg(required = true, value_name = "LATENTS")]
    latents: Vec<PathBuf>,

    /// Weights: a folder in diffusers' layout, or a .safetensors file
    #[arg(long, value_name = "PATH")]
    vae: PathBuf,

    /// A diffusers config.json, in place of the one beside the weights
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Model family, for weights without a config: sd, sdxl, sd3, flux1 or flux2
    #[arg(long, value_name = "FAMILY")]
    family: Option<Family>,

    /// The space of the latents, where it is not what decode infers: diffusion or vae
    #[arg(long, value_name = "SPACE", value_parser = parse_space)]
    latent_space: Option<LatentSpace>,

    /// Height of the images in pixels, for latents that are tokens
    #[arg(long, value_name = "H")]
    height: Option<usize>,

    /// Width of the images in pixels, for latents that are tokens
    #[arg(long, value_name = "W")]
    width: Option<usize>,

    /// Where to decode: auto, cpu, cuda, cuda:N, wgpu or wgpu:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceName,

    /// How to decode: lossless or high
    #[arg(long, value_name = "QUALITY", default_value_t)]
    quality: Quality,

    /// The file to write; by default where the decoder looks for it, the weights' name with .preview.json
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Overwrite a file that exists
    #[arg(long)]
    force: bool,
}

pub fn run(args: &Args) -> Result {
    let (device, _) = args.device.open()?;
    let options = LoadOptions {
        config: args.config.clone(),
        family: args.family,
        dtype: None,
    };
    let loaded = VaeDecoder::load(&args.vae, &device, &options)?;
    let output = match (&args.output, loaded.files.first()) {
        (Some(output), _) => output.clone(),
        (None, Some(weights)) => PreviewProjection::path_beside(weights),
        (None, None) => return Err("no file of weights was read; pass --output".into()),
    };
    whole_file::check(Some(&output), "json", args.force)?;
    let read: Vec<&Path> = args.latents.iter().chain(&loaded.files).map(PathBuf::as_path).collect();
    whole_file::check_is_no_input(&output, &read)?;

    let options = LatentsOptions {
        space: args.latent_space,
        height: args.height,
        width: args.width,
    };
    // All files are read before the first is decoded: a bad one is found at once.
    let mut inputs = Vec::with_capacity(args.latents.len());
    for path in &args.latents {
        let in_file = |error: Error| format!("{}: {error}", path.display());
        let file = LatentFile::read(path)?;
        let reading = LatentsReading::infer(&file.shape, &file.hint, &loaded.config, &options).map_err(in_file)?;
        inputs.push((path, file, reading));
    }
    let mut samples = Vec::new();
    for (path, file, reading) in &inputs {
        for index in 0..reading.batch {
            let in_file = |error: Error| format!("{}: {error}", path.display());
            let latents = latents_from_file(file, reading, index, &device);
            samples.push(preview_sample(&loaded.decoder, latents, args.quality).map_err(in_file)?);
        }
    }
    let projection = PreviewProjection::fit(&samples)?;
    let names = inputs.iter().flat_map(|(path, _, reading)| {
        let name = path.file_stem().unwrap_or_default().display().to_string();
        (0..reading.batch).map(move |index| match reading.batch {
            1 => name.clone(),
            _ => format!("{name}_{index}"),
        })
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "PSNR against the averaged decode, dB\n")?;
    writeln!(
        out,
        "{:24} {:>7} {:>11} {:>11}",
        "", "preview", "if left out", "mean colour"
    )?;
    for (name, row) in names.zip(rows(&samples, &projection)?) {
        let held_out = row.held_out.map_or("-".to_string(), |psnr| format!("{psnr:.2}"));
        writeln!(
            out,
            "{name:24} {:7.2} {held_out:>11} {:11.2}",
            row.fitted, row.mean_colour
        )?;
    }
    whole_file::write(&output, &projection.to_json(), args.force)?;
    writeln!(out, "\nwrote {}", output.display())?;
    Ok(())
}

/// How close previews of a picture come, as PSNR in dB with a range of 2.
struct Row {
    fitted: f64,
    /// With a fit to the other pictures, if there are any.
    held_out: Option<f64>,
    /// The picture's own mean colour all over.
    mean_colour: f64,
}

fn rows(samples: &[PreviewSample], projection: &PreviewProjection) -> Result<Vec<Row>> {
    let psnr =
        |image: &Image, sample: &PreviewSample| Ok::<_, Error>(Metrics::of_images(image, sample.colours(), 0)?.psnr_db);
    let row = |(left_out, sample): (usize, &PreviewSample)| {
        let others = samples.iter().enumerate().filter(|(i, _)| *i != left_out);
        let held_out = match samples.len() {
            1 => None,
            _ => {
                let fit = PreviewProjection::fit(others.map(|(_, sample)| sample))?;
                Some(psnr(&fit.apply(sample)?, sample)?)
            }
        };
        Ok(Row {
            fitted: psnr(&projection.apply(sample)?, sample)?,
            held_out,
            mean_colour: psnr(&sample.mean_colour(), sample)?,
        })
    };
    samples.iter().enumerate().map(row).collect()
}

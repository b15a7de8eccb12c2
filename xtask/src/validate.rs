//! `xtask validate`: decodes latents two ways and says how far apart the images are.

mod chart;
mod decoder;
mod page;
mod reference;
mod results;
mod table;
pub mod whole_file;

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use burn_vae::{Family, VaeConfig};
use vae_io::{Error, LatentFile, LatentSpace, LatentsOptions, LatentsReading};

use crate::{Result, checkout};
use decoder::{Decoder, Models, Spec};
use page::Card;
use reference::Reference;
use results::{Bar, Comparison, Report, Row, Side, Way};

/// Decode latents two ways and compare the images.
///
/// Side A is decoded; side B is decoded too (--b), or comes from files (--reference), or is the truth: the Lossless f32
/// decode on the CPU. A table goes to standard output; --html writes a report with pictures.
///
/// A side is a list such as quality=lossless,device=cuda,dtype=bf16. What it leaves out is as in decode: lossless, auto,
/// auto.
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

    /// The tensor of the files, where they hold several
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,

    /// Height of the images in pixels, for latents that are tokens
    #[arg(long, value_name = "H")]
    height: Option<usize>,

    /// Width of the images in pixels, for latents that are tokens
    #[arg(long, value_name = "W")]
    width: Option<usize>,

    /// How side A decodes
    #[arg(long, value_name = "KEY=VALUE,...", default_value_t)]
    a: Spec,

    /// How side B decodes; without it and --reference, B is the truth
    #[arg(long, value_name = "KEY=VALUE,...", conflicts_with = "reference")]
    b: Option<Spec>,

    /// Side B from files instead: .safetensors or .npy with f32 images in -1..1, or .png; one file for each of LATENTS in
    /// the same order, or a folder that holds STEM.safetensors, STEM.npy or STEM.png for each
    #[arg(long, value_name = "PATH", num_args = 1..)]
    reference: Vec<PathBuf>,

    /// Leave out the truth, which takes a decode on the CPU for every picture
    #[arg(long)]
    no_truth: bool,

    /// Fail if the PSNR of A against B is below this in any picture, in dB with a range of 2
    #[arg(long, value_name = "DB", value_parser = parse_finite, allow_negative_numbers = true)]
    bar: Option<f64>,

    /// Write the figures as JSON; - is standard output, and the table then goes to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write a report with pictures, differences and a chart: one file that needs nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// How much the report brightens the difference of A and B, 1 to 65536
    #[arg(long, value_name = "FACTOR", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    amplify: u32,

    /// Overwrite reports that exist
    #[arg(long)]
    force: bool,
}

pub fn parse_space(name: &str) -> std::result::Result<LatentSpace, String> {
    [LatentSpace::Diffusion, LatentSpace::Vae]
        .into_iter()
        .find(|space| space.to_string() == name)
        .ok_or_else(|| format!("`{name}` is not a space, use diffusion or vae"))
}

fn parse_finite(number: &str) -> std::result::Result<f64, String> {
    let finite = number.parse().ok().filter(|number: &f64| number.is_finite());
    finite.ok_or_else(|| format!("`{number}` is not a number"))
}

/// One file of latents: what it holds, what that means, and its images on side B if they are read.
struct Input {
    label: String,
    file: LatentFile,
    reading: LatentsReading,
    reference: Option<Reference>,
}

impl Input {
    /// What image `index` of the batch is called.
    fn picture(&self, index: usize) -> String {
        match self.reading.batch {
            1 => self.label.clone(),
            _ => format!("{}_{index}", self.label),
        }
    }
}

/// Compares, and writes what was found; whatever can be checked is checked before the first decode.
pub fn run(args: &Args) -> Result {
    if args.no_truth && args.b.is_none() && args.reference.is_empty() {
        return Err("nothing to compare with: pass --b or --reference, or leave out --no-truth".into());
    }
    let json = args.json.as_deref().filter(|&path| path != Path::new("-"));
    whole_file::check(json, "json", args.force)?;
    whole_file::check(args.html.as_deref(), "html", args.force)?;

    let mut models = Models::new(&args.vae, args.config.as_deref(), args.family);
    let a = models.decoder(&args.a)?;
    let b = match args.reference.as_slice() {
        [] => Some(models.decoder(args.b.as_ref().unwrap_or(&Spec::TRUTH))?),
        _ => None,
    };
    let ways = [Some(&a), b.as_ref()];
    // A side that is the truth is not decoded once more.
    let needs_truth = !args.no_truth && !ways.into_iter().flatten().any(Decoder::is_truth);
    let truth = needs_truth.then(|| models.decoder(&Spec::TRUTH)).transpose()?;
    let inputs = read_inputs(args, a.config())?;
    let read: Vec<&Path> = [&args.latents, &args.reference, models.files()]
        .into_iter()
        .flatten()
        .map(PathBuf::as_path)
        .collect();
    for output in [json, args.html.as_deref()].into_iter().flatten() {
        whole_file::check_is_no_input(output, &read)?;
    }

    let mut rows = match truth {
        Some(_) => vec![(Side::A, Side::B), (Side::A, Side::Truth), (Side::B, Side::Truth)],
        None => vec![(Side::A, Side::B)],
    }
    .into_iter()
    .map(|sides| (sides, Vec::new()))
    .collect::<Vec<_>>();
    let mut cards = Vec::new();
    let pictures = inputs
        .iter()
        .flat_map(|input| (0..input.reading.batch).map(move |index| (input, index)));
    let count = pictures.clone().count();
    for (number, (input, index)) in pictures.enumerate() {
        let picture = input.picture(index);
        say(&format!("{picture} ({} of {count})", number + 1));
        let in_picture = |error: Box<dyn std::error::Error>| format!("{picture}: {error}");
        let decode = |decoder: &Decoder| decoder.decode(&input.file, &input.reading, index).map_err(in_picture);
        let of_a = decode(&a)?;
        let of_b = match (&b, &input.reference) {
            (Some(decoder), _) => decode(decoder)?,
            (None, Some(reference)) => reference.image(index),
            (None, None) => return Err(format!("{picture}: no reference was read").into()),
        };
        let of_truth = truth.as_ref().map(decode).transpose()?;

        let mut pairs = vec![(&of_a, &of_b)];
        pairs.extend(of_truth.iter().flat_map(|truth| [(&of_a, truth), (&of_b, truth)]));
        for ((_, rows), (of, against)) in rows.iter_mut().zip(pairs) {
            rows.push(Row::compare(&picture, of, against).map_err(|error| in_picture(error.into()))?);
        }
        if args.html.is_some() {
            cards.push(Card::new(&input.reading, &of_a, &of_b, args.amplify)?);
        }
    }
    let comparisons: Vec<_> = rows
        .into_iter()
        .map(|((of, against), rows)| Comparison::new(of, against, rows))
        .collect();
    let report = Report {
        burn_vae: env!("CARGO_PKG_VERSION"),
        commit: checkout::commit(),
        date: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string(),
        vae: args.vae.display().to_string(),
        model: model_name(a.config()),
        a: a.way(),
        b: match &b {
            Some(decoder) => decoder.way(),
            None => Way::Reference {
                files: args.reference.iter().map(|path| path.display().to_string()).collect(),
                is_eight_bit: inputs.iter().flat_map(|input| &input.reference).any(|r| r.is_eight_bit),
            },
        },
        bar: args.bar.map(|bar| Bar::judge(bar, &comparisons[0])),
        comparisons,
    };

    let table = table::Table(&report).to_string();
    match (&args.json, json) {
        (Some(_), None) => {
            print(&(serde_json::to_string_pretty(&report)? + "\n"))?;
            say(table.trim_end());
        }
        (_, path) => {
            if let Some(path) = path {
                whole_file::write(path, &(serde_json::to_string_pretty(&report)? + "\n"), args.force)?;
            }
            print(&table)?;
        }
    }
    if let Some(path) = &args.html {
        let page = page::Page {
            report: &report,
            cards: &cards,
            amplify: args.amplify,
        };
        whole_file::write(path, &page.to_string(), args.force)?;
    }
    report.bar.as_ref().map_or(Ok(()), |bar| bar.check(count))
}

/// Reads and checks the latents, and the references of side B if there are any.
fn read_inputs(args: &Args, config: &VaeConfig) -> Result<Vec<Input>> {
    let options = LatentsOptions {
        space: args.latent_space,
        height: args.height,
        width: args.width,
    };
    let references = reference::pair(&args.latents, &args.reference)?;
    let labels = labels(&args.latents);
    let mut inputs = Vec::with_capacity(args.latents.len());
    for (i, (path, label)) in args.latents.iter().zip(labels).enumerate() {
        let in_file = |error: Error| match error {
            Error::InvalidLatents { .. } | Error::AmbiguousLatents { .. } => format!("`{}`: {error}", path.display()),
            error => error.to_string(),
        };
        let file = LatentFile::read_tensor(path, args.tensor.as_deref()).map_err(in_file)?;
        let reading = LatentsReading::infer(&file.shape, &file.hint, config, &options).map_err(in_file)?;
        say(&format!("{}: {reading}", path.display()));
        let shape = [
            reading.batch,
            config.decoder().out_channels,
            reading.height,
            reading.width,
        ];
        let reference = references.get(i).map(|path| Reference::read(path, shape)).transpose()?;
        inputs.push(Input {
            label,
            file,
            reading,
            reference,
        });
    }
    Ok(inputs)
}

/// Names of files in tables: their stems, or all of their paths if two have the same.
fn labels(paths: &[PathBuf]) -> Vec<String> {
    let stems: Vec<_> = paths.iter().map(|path| path.file_stem().unwrap_or_default()).collect();
    let unique = stems.iter().collect::<std::collections::BTreeSet<_>>().len() == stems.len();
    let label = |(path, stem): (&PathBuf, &&std::ffi::OsStr)| match unique {
        true => Path::new(stem).display().to_string(),
        false => path.display().to_string(),
    };
    paths.iter().zip(&stems).map(label).collect()
}

/// diffusers' name of the class, and the family where the config is one's own.
fn model_name(config: &VaeConfig) -> String {
    let class = match config {
        VaeConfig::AutoencoderKl(_) => "AutoencoderKL",
        VaeConfig::Flux2(_) => "AutoencoderKLFlux2",
    };
    match config.family() {
        Some(family) => format!("{class} ({family})"),
        None => class.to_string(),
    }
}

/// A line of progress on standard error. Nothing is lost but words where that is closed.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn print(text: &str) -> Result {
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|error| format!("cannot write standard output: {error}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_stem_are_told_apart() {
        let labels = |paths: &[&str]| super::labels(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(labels(&["x/cat.npy", "y/dog.v1.safetensors"]), ["cat", "dog.v1"]);
        assert_eq!(labels(&["x/cat.npy", "y/cat.npy"]), ["x/cat.npy", "y/cat.npy"]);
    }

    #[test]
    fn a_bar_that_no_picture_could_miss_is_refused() {
        assert!(parse_finite("nan").is_err() && parse_finite("-inf").is_err() && parse_finite("high").is_err());
        assert_eq!(parse_finite("55"), Ok(55.0));
    }
}

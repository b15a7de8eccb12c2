//! A diffusion pipeline on Burn: samples latents, previews every step, decodes, and writes the picture.
//!
//! ```sh
//! cargo run --release -p examples --example pipeline -- --picture coffee --quality high --previews previews
//! ```
//!
//! Everything stays on the device that the caller opened: noise is made there, previews and the decode take the sampler's
//! own tensors, and nothing is copied to the host but the pictures that are shown or written. Without the measurements, which
//! wait for the device after every step, nothing here would wait before the picture is read.

use std::{
    fmt::Write,
    io::IsTerminal,
    path::PathBuf,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_vae::{DeviceName, Latents, LoadOptions, Quality, VaeDecoder, io};
use clap::{Parser, builder::PossibleValuesParser, builder::TypedValueParser};
use examples::{Denoiser, Picture, Result, Step, sample};
use indicatif::{ProgressBar, ProgressStyle};

/// Sample a picture and decode it.
#[derive(Debug, Parser)]
struct Args {
    /// What to sample
    #[arg(long, default_value = "astronaut", value_parser = picture_parser())]
    picture: Picture,

    /// How to decode: lossless or high
    #[arg(long, value_name = "QUALITY", default_value_t)]
    quality: Quality,

    /// auto, cpu, cuda[:N] or wgpu[:N]
    #[arg(long, default_value = "auto")]
    device: DeviceName,

    /// Steps of the sampler
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u16).range(1..=1000))]
    steps: u16,

    /// Of the noise
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// The picture to write: .png, .jpg or .webp
    #[arg(short, long, value_name = "FILE", default_value = "pipeline.png")]
    output: PathBuf,

    /// A folder for the previews of all steps
    #[arg(long, value_name = "FOLDER")]
    previews: Option<PathBuf>,

    /// Overwrite what exists
    #[arg(long)]
    force: bool,
}

fn picture_parser() -> impl TypedValueParser<Value = Picture> {
    PossibleValuesParser::new(Picture::ALL.map(Picture::name)).map(|name| {
        let picture = Picture::ALL.into_iter().find(|picture| picture.name() == name);
        picture.unwrap_or(Picture::Astronaut)
    })
}

fn main() -> Result {
    let args = Args::parse();
    io::OutputFormat::check(&args.output, args.force)?;
    if let Some(folder) = &args.previews {
        std::fs::create_dir_all(folder).map_err(io::Error::io("create", folder))?;
    }
    let (device, name) = args.device.open()?;

    let loaded = VaeDecoder::load(examples::VAE, &device, &LoadOptions::default())?;
    let preview = loaded
        .preview()?
        .ok_or("the VAE has no previews; run cargo xtask fit-preview")?;
    let vae = loaded.decoder;
    let denoiser = Denoiser::load(&device)?;

    // Kernels are compiled and weights folded before anything is timed; a quality that cannot run is refused here.
    let shape = args.picture.latent_shape();
    let [_, _, height, width] = shape;
    vae.warm_up(&[(2 * height, 2 * width)], args.quality)?;
    device.seed(args.seed);
    let noise = || Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32));
    preview.image(Latents::diffusion(sample(
        &denoiser,
        noise(),
        args.picture,
        1,
        &mut |_| {},
    )))?;
    device.sync()?;

    let view = View::new(args.steps.into());
    let mut timer = Timer::new(&device);
    let (mut stepping, mut previewing) = (Duration::ZERO, Duration::ZERO);
    let mut failed = None;
    device.seed(args.seed);
    let noise = noise();
    timer.lap()?;
    let mut on_step = |step: Step| {
        let look = || -> Result {
            stepping += timer.lap()?;
            let image = preview.image(Latents::diffusion(step.estimate))?;
            previewing += timer.lap()?;
            // The only copies to the host, and only if someone looks.
            if view.is_visible() || args.previews.is_some() {
                let image = to_host(image)?;
                view.show(&image, step.index + 1)?;
                if let Some(folder) = &args.previews {
                    let name = format!("step-{:03}.png", step.index + 1);
                    image.save(0, folder.join(name), args.force)?;
                }
            }
            timer.lap()?;
            Ok(())
        };
        if let Err(error) = look() {
            failed.get_or_insert(error);
        }
    };
    let latents = sample(&denoiser, noise, args.picture, args.steps.into(), &mut on_step);
    if let Some(error) = failed {
        return Err(error);
    }
    view.finish();
    stepping += timer.lap()?;
    let image = vae.decode(Latents::diffusion(latents), args.quality)?;
    let decoding = timer.lap()?;

    let image = to_host(image)?;
    image.save(0, &args.output, args.force)?;
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let steps = f64::from(args.steps);
    println!(
        "{name}, {}x{} pixels, quality {}",
        image.width(),
        image.height(),
        args.quality
    );
    println!("step    {:9.2} ms, {} of them", ms(stepping) / steps, args.steps);
    println!("preview {:9.2} ms", ms(previewing) / steps);
    println!(
        "decode  {:9.2} ms: {:.1} steps, {:.0}% of sampling and decoding",
        ms(decoding),
        ms(decoding) / (ms(stepping) / steps),
        100.0 * ms(decoding) / ms(stepping + decoding),
    );
    println!("wrote {}", args.output.display());
    Ok(())
}

/// Times what the device does: waits for it at the end of each lap. Without waiting, only launches would be measured.
struct Timer<'a> {
    device: &'a Device,
    started: Instant,
}

impl<'a> Timer<'a> {
    fn new(device: &'a Device) -> Self {
        Self {
            device,
            started: Instant::now(),
        }
    }

    fn lap(&mut self) -> Result<Duration> {
        self.device.sync()?;
        let now = Instant::now();
        let lap = now - self.started;
        self.started = now;
        Ok(lap)
    }
}

fn to_host(image: Tensor<4>) -> Result<io::Image> {
    let shape = image.dims();
    Ok(io::Image::new(
        shape,
        image.try_into_data_dtype(DType::F32)?.try_into_vec()?,
    ))
}

/// The preview and a progress bar, where standard error is a terminal.
struct View(ProgressBar);

impl View {
    fn new(steps: u64) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let style = ProgressStyle::with_template("{msg}\n[{bar:40}] {pos}/{len} steps ({elapsed})");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        Self(ProgressBar::new(steps).with_style(style))
    }

    fn is_visible(&self) -> bool {
        !self.0.is_hidden()
    }

    fn show(&self, image: &io::Image, steps: usize) -> Result {
        if self.is_visible() {
            self.0.set_message(half_blocks(&image.to_rgb8(0)?)?);
            self.0.set_position(steps as u64);
        }
        Ok(())
    }

    fn finish(&self) {
        self.0.finish();
    }
}

/// Two rows of pixels in a line of text: the upper half of a character in one colour, the lower in another.
fn half_blocks(image: &io::Rgb8) -> Result<String> {
    let mut text = String::new();
    let (pixels, _) = image.pixels.as_chunks::<3>();
    let rows: Vec<_> = pixels.chunks_exact(image.width).collect();
    for pair in rows.chunks(2) {
        for column in 0..image.width {
            let [r, g, b] = pair[0][column];
            write!(text, "\x1b[38;2;{r};{g};{b}m")?;
            if let Some([r, g, b]) = pair.get(1).map(|row| row[column]) {
                write!(text, "\x1b[48;2;{r};{g};{b}m")?;
            }
            text.push('▀');
        }
        text.push_str("\x1b[0m\n");
    }
    Ok(text)
}

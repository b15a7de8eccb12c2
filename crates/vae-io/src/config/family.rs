//! The families of models, and how configs relate to them.

use std::fmt;
use std::str::FromStr;

use super::{AutoencoderKlConfig, Flux2Config, VaeConfig, ensure};
use crate::{Error, Result};

/// The models whose decoders are known by name.
///
/// Z-Image uses FLUX.1's, SD 1 and SD 2 share one, SD3.5 uses SD3's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Stable Diffusion 1.x and 2.x.
    Sd,
    /// Stable Diffusion XL.
    Sdxl,
    /// Stable Diffusion 3 and 3.5.
    Sd3,
    /// FLUX.1, Z-Image.
    Flux1,
    /// FLUX.2 and its small decoder.
    Flux2,
}

impl Family {
    /// All families, in the order in which messages list them.
    pub const ALL: [Self; 5] = [Self::Sd, Self::Sdxl, Self::Sd3, Self::Flux1, Self::Flux2];

    /// The name that [`FromStr`] reads: `sd`, `sdxl`, `sd3`, `flux1` or `flux2`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sd => "sd",
            Self::Sdxl => "sdxl",
            Self::Sd3 => "sd3",
            Self::Flux1 => "flux1",
            Self::Flux2 => "flux2",
        }
    }

    /// Channels of the latents in VAE space.
    pub const fn latent_channels(self) -> usize {
        match self {
            Self::Sd | Self::Sdxl => 4,
            Self::Sd3 | Self::Flux1 => 16,
            Self::Flux2 => 32,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Family {
    type Err = Error;

    /// Fails with [`Error::UnknownFamily`], which lists the names.
    fn from_str(name: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|family| family.name() == name);
        known.ok_or_else(|| Error::UnknownFamily {
            reason: format!("{name:?} is not a family"),
            candidates: names(&Self::ALL),
        })
    }
}

/// Their names as messages list them.
pub(super) fn names(families: &[Family]) -> String {
    families
        .iter()
        .map(|family| family.name())
        .collect::<Vec<_>>()
        .join("|")
}

impl VaeConfig {
    /// The full-size config of a family.
    pub fn preset(family: Family) -> Self {
        match family {
            Family::Sd => Self::AutoencoderKl(AutoencoderKlConfig::sd()),
            Family::Sdxl => Self::AutoencoderKl(AutoencoderKlConfig::sdxl()),
            Family::Sd3 => Self::AutoencoderKl(AutoencoderKlConfig::sd3()),
            Family::Flux1 => Self::AutoencoderKl(AutoencoderKlConfig::flux1()),
            Family::Flux2 => Self::Flux2(Flux2Config::flux2()),
        }
    }

    /// The family with this class, latent channels and scaling, of whatever size. Playground has no family.
    pub fn family(&self) -> Option<Family> {
        Family::ALL
            .into_iter()
            .find(|family| self.check_family(*family).is_ok())
    }

    /// Checks that the config may be one of `family`: the same class, latent channels and scaling.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedConfig`] that names the field and both values.
    pub fn check_family(&self, family: Family) -> Result<()> {
        let preset = Self::preset(family);
        let same = |field, found: String, expected: String| {
            ensure(
                found == expected,
                field,
                found,
                format!("{expected} for family {family}"),
            )
        };
        let class = |config: &Self| match config {
            Self::AutoencoderKl(_) => "AutoencoderKL".to_owned(),
            Self::Flux2(_) => "AutoencoderKLFlux2".to_owned(),
        };
        let latent_channels = |config: &Self| config.decoder().latent_channels.to_string();
        same("_class_name", class(self), class(&preset))?;
        same("latent_channels", latent_channels(self), latent_channels(&preset))?;
        if let (Self::AutoencoderKl(this), Self::AutoencoderKl(preset)) = (self, &preset) {
            // As f32, which is what some converters have rounded the numbers to.
            let scale = |config: &AutoencoderKlConfig| (config.scaling_factor as f32).to_string();
            let shift = |config: &AutoencoderKlConfig| (config.shift_factor.unwrap_or(0.0) as f32).to_string();
            let mean = |config: &AutoencoderKlConfig| match &config.latents_mean {
                Some(mean) => format!("{mean:?}"),
                None => "absent".to_owned(),
            };
            same("scaling_factor", scale(this), scale(preset))?;
            same("shift_factor", shift(this), shift(preset))?;
            same("latents_mean", mean(this), mean(preset))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_parse_print_and_are_recognised() {
        for family in Family::ALL {
            assert_eq!(family.to_string().parse::<Family>().unwrap(), family);
            let preset = VaeConfig::preset(family);
            preset.validate().unwrap();
            assert_eq!(preset.family(), Some(family));
            assert_eq!(preset.decoder().latent_channels, family.latent_channels());
            assert_eq!(preset.decoder().upscale(), 8);
        }
        let error = "sd15".parse::<Family>().unwrap_err().to_string();
        assert!(error.contains("sd|sdxl|sd3|flux1|flux2"), "{error}");
    }

    #[test]
    fn presets_have_the_published_numbers() {
        let numbers = |config: AutoencoderKlConfig| {
            (
                config.scaling_factor,
                config.shift_factor,
                config.use_post_quant_conv,
                config.decoder.latent_channels,
            )
        };
        assert_eq!(numbers(AutoencoderKlConfig::sd()), (0.18215, None, true, 4));
        assert_eq!(numbers(AutoencoderKlConfig::sdxl()), (0.13025, None, true, 4));
        assert_eq!(numbers(AutoencoderKlConfig::sd3()), (1.5305, Some(0.0609), false, 16));
        assert_eq!(numbers(AutoencoderKlConfig::flux1()), (0.3611, Some(0.1159), false, 16));
        assert_eq!(numbers(AutoencoderKlConfig::playground()), (0.5, None, true, 4));

        let playground = VaeConfig::AutoencoderKl(AutoencoderKlConfig::playground());
        playground.validate().unwrap();
        assert_eq!(playground.family(), None);
        let small = VaeConfig::Flux2(Flux2Config::small());
        small.validate().unwrap();
        assert_eq!(small.family(), Some(Family::Flux2));
        assert_eq!(small.decoder().block_out_channels, [96, 192, 384, 384]);
    }

    #[test]
    fn a_family_that_contradicts_the_config_is_refused_with_both_numbers() {
        let check =
            |config: Family, family: Family| VaeConfig::preset(config).check_family(family).unwrap_err().to_string();
        let both = |error: String, a: &str, b: &str| assert!(error.contains(a) && error.contains(b), "{error}");
        both(check(Family::Sd, Family::Sdxl), "0.18215", "0.13025 for family sdxl");
        both(check(Family::Sd3, Family::Flux1), "1.5305", "0.3611 for family flux1");
        both(
            check(Family::Sd, Family::Flux1),
            "latent_channels is 4",
            "16 for family flux1",
        );
        both(
            check(Family::Flux1, Family::Flux2),
            "AutoencoderKL,",
            "AutoencoderKLFlux2 for family flux2",
        );

        // Same scaling, but without its shift: washed-out pictures.
        let mut config = AutoencoderKlConfig::flux1();
        config.shift_factor = None;
        let error = VaeConfig::AutoencoderKl(config)
            .check_family(Family::Flux1)
            .unwrap_err();
        both(error.to_string(), "shift_factor is 0,", "0.1159");
    }
}

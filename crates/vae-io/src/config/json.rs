//! Reading diffusers' `config.json`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::family::names;
use super::{AutoencoderKlConfig, DecoderConfig, Family, Flux2Config, VaeConfig, ensure, unsupported};
use crate::{Error, Result};

const CLASS_NAME: &str = "_class_name";

/// A config.json has about thirty short lines.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

impl VaeConfig {
    /// Reads diffusers' `config.json`. Unknown fields are ignored; missing ones are what diffusers' constructors
    /// default to.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]; [`Error::InvalidFile`] if it is not JSON or a field has another type;
    /// [`Error::UnsupportedConfig`] for values that cannot be decoded; [`Error::UnknownFamily`] if nothing tells the
    /// class.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_value(read_json(path, "config", MAX_CONFIG_BYTES)?, path)
    }

    /// Like [`read`](Self::read), from the text of a config; errors call it `config.json`.
    pub fn from_json(text: &str) -> Result<Self> {
        let path = Path::new("config.json");
        let value = serde_json::from_str(text).map_err(|e| Error::invalid_file(path, "config", e.to_string()))?;
        Self::from_value(value, path)
    }

    fn from_value(value: Value, path: &Path) -> Result<Self> {
        let Value::Object(map) = value else {
            return Err(Error::invalid_file(path, "config", "it is not a JSON object"));
        };
        let fields = Fields { path, map };
        let config = match fields.or::<Option<String>>(CLASS_NAME, None)?.as_deref() {
            Some("AutoencoderKL") => Self::AutoencoderKl(AutoencoderKlConfig::read(&fields)?),
            Some("AutoencoderKLFlux2") => Self::Flux2(Flux2Config::read(&fields)?),
            Some(other) => {
                return Err(unsupported(
                    CLASS_NAME,
                    format!("{other:?}"),
                    "AutoencoderKL and AutoencoderKLFlux2",
                ));
            }
            None if fields.has("batch_norm_eps") => Self::Flux2(Flux2Config::read(&fields)?),
            // Other autoencoders have latent_channels too, but those write their class.
            None if fields.has("latent_channels") => Self::AutoencoderKl(AutoencoderKlConfig::read(&fields)?),
            None => {
                return Err(Error::UnknownFamily {
                    reason: format!("`{}` has no {CLASS_NAME}", path.display()),
                    candidates: names(&Family::ALL),
                });
            }
        };
        config.validate()?;
        Ok(config)
    }
}

impl AutoencoderKlConfig {
    fn read(fields: &Fields<'_>) -> Result<Self> {
        let defaults = Self::default();
        let widths = fields.or("block_out_channels", defaults.decoder.block_out_channels.clone())?;
        Ok(Self {
            decoder: DecoderConfig::read(fields, widths, defaults.decoder)?,
            use_post_quant_conv: fields.or("use_post_quant_conv", defaults.use_post_quant_conv)?,
            scaling_factor: fields.or("scaling_factor", defaults.scaling_factor)?,
            shift_factor: fields.or("shift_factor", None)?,
            latents_mean: fields.or("latents_mean", None)?,
            latents_std: fields.or("latents_std", None)?,
            force_upcast: fields.or("force_upcast", defaults.force_upcast)?,
        })
    }
}

impl Flux2Config {
    fn read(fields: &Fields<'_>) -> Result<Self> {
        let defaults = Self::default();
        let encoder_widths = fields.or("block_out_channels", defaults.decoder.block_out_channels.clone())?;
        let widths: Option<Vec<usize>> = fields.or("decoder_block_out_channels", None)?;
        let patch: Vec<usize> = fields.or("patch_size", defaults.patch_size.to_vec())?;
        let patch_size = <[usize; 2]>::try_from(patch)
            .map_err(|other| unsupported("patch_size", format!("a list of {}", other.len()), "[2, 2]"))?;
        Ok(Self {
            decoder: DecoderConfig::read(fields, widths.unwrap_or(encoder_widths), defaults.decoder)?,
            use_post_quant_conv: fields.or("use_post_quant_conv", defaults.use_post_quant_conv)?,
            batch_norm_eps: fields.or("batch_norm_eps", defaults.batch_norm_eps)?,
            patch_size,
            force_upcast: fields.or("force_upcast", defaults.force_upcast)?,
        })
    }
}

impl DecoderConfig {
    /// Reads the fields that both classes have; `widths` are the decoder's.
    fn read(fields: &Fields<'_>, widths: Vec<usize>, defaults: Self) -> Result<Self> {
        let act_fn: String = fields.or("act_fn", "silu".to_owned())?;
        // diffusers builds the same nn.SiLU for either name.
        ensure(
            matches!(&*act_fn, "silu" | "swish"),
            "act_fn",
            format!("{act_fn:?}"),
            "silu",
        )?;

        let standard = "UpDecoderBlock2D";
        let default_types = vec![standard.to_owned(); defaults.block_out_channels.len()];
        let types: Vec<String> = fields.or("up_block_types", default_types)?;
        if let Some(other) = types.iter().find(|name| *name != standard) {
            return Err(unsupported("up_block_types", format!("{other:?}"), standard));
        }
        let one_each = format!("one for each of the {} block_out_channels", widths.len());
        ensure(
            types.len() == widths.len(),
            "up_block_types",
            format!("a list of {}", types.len()),
            one_each,
        )?;

        Ok(Self {
            latent_channels: fields.or("latent_channels", defaults.latent_channels)?,
            out_channels: fields.or("out_channels", defaults.out_channels)?,
            block_out_channels: widths,
            layers_per_block: fields.or("layers_per_block", defaults.layers_per_block)?,
            norm_num_groups: fields.or("norm_num_groups", defaults.norm_num_groups)?,
            mid_block_add_attention: fields.or("mid_block_add_attention", defaults.mid_block_add_attention)?,
        })
    }
}

/// The fields of a config.json, read one by one so that errors can name them.
struct Fields<'a> {
    path: &'a Path,
    map: Map<String, Value>,
}

impl Fields<'_> {
    fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// A field, or `default` without it. `null` is a value of an `Option` only: in Python it is not the default either.
    fn or<T: DeserializeOwned>(&self, name: &'static str, default: T) -> Result<T> {
        let Some(value) = self.map.get(name) else {
            return Ok(default);
        };
        T::deserialize(value).map_err(|e| Error::invalid_file(self.path, "config", format!("{name}: {e}")))
    }
}

/// Whether a config.json beside a single file of weights is meant for them: anything but the readable config of another
/// model. One that is broken is taken, so that reading it says so instead of decoding without it.
pub(crate) fn is_autoencoder_kl(path: &Path) -> bool {
    if !path.is_file() {
        return false;
    }
    let Ok(config) = read_json(path, "config", MAX_CONFIG_BYTES) else {
        return true;
    };
    match config.get(CLASS_NAME) {
        Some(class) => class.as_str().is_some_and(|class| class.starts_with("AutoencoderKL")),
        None => config.get("latent_channels").is_some() || config.get("batch_norm_eps").is_some(),
    }
}

/// Reads a JSON file of at most `limit` bytes, so that a wrong path cannot fill memory.
pub(crate) fn read_json(path: &Path, kind: &'static str, limit: u64) -> Result<Value> {
    let mut text = Vec::new();
    let file = File::open(path).map_err(Error::io("open", path))?;
    let read = file
        .take(limit + 1)
        .read_to_end(&mut text)
        .map_err(Error::io("read", path))?;
    if read as u64 > limit {
        return Err(Error::invalid_file(
            path,
            kind,
            format!("it is larger than {limit} bytes"),
        ));
    }
    serde_json::from_slice(&text).map_err(|e| Error::invalid_file(path, kind, e.to_string()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Result<VaeConfig> {
        VaeConfig::from_json(&value.to_string())
    }

    /// A small config of the class with some fields replaced.
    fn with(class: &str, changes: Value) -> Value {
        let mut config = json!({
            "_class_name": class,
            "block_out_channels": [32, 64],
            "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D"],
            "norm_num_groups": 16,
        });
        let fields = config.as_object_mut().unwrap();
        fields.extend(changes.as_object().unwrap().clone());
        config
    }

    fn refused(value: Value) -> (&'static str, String) {
        match parse(value) {
            Err(Error::UnsupportedConfig { field, value, .. }) => (field, value),
            other => panic!("expected UnsupportedConfig, got {other:?}"),
        }
    }

    #[test]
    fn missing_fields_are_what_diffusers_defaults_to() {
        let config = parse(json!({"_class_name": "AutoencoderKL"})).unwrap();
        let expected = AutoencoderKlConfig {
            decoder: DecoderConfig {
                latent_channels: 4,
                out_channels: 3,
                block_out_channels: vec![64],
                layers_per_block: 1,
                norm_num_groups: 32,
                mid_block_add_attention: true,
            },
            use_post_quant_conv: true,
            scaling_factor: 0.18215,
            shift_factor: None,
            latents_mean: None,
            latents_std: None,
            force_upcast: true,
        };
        assert_eq!(config, VaeConfig::AutoencoderKl(expected));

        let config = parse(json!({"_class_name": "AutoencoderKLFlux2"})).unwrap();
        let expected = Flux2Config {
            decoder: DecoderConfig {
                latent_channels: 32,
                out_channels: 3,
                block_out_channels: vec![128, 256, 512, 512],
                layers_per_block: 2,
                norm_num_groups: 32,
                mid_block_add_attention: true,
            },
            use_post_quant_conv: true,
            batch_norm_eps: 1e-4,
            patch_size: [2, 2],
            force_upcast: true,
        };
        assert_eq!(config, VaeConfig::Flux2(expected));
    }

    #[test]
    fn every_field_is_read_and_not_only_defaulted() {
        let config = parse(with(
            "AutoencoderKL",
            json!({
                "latent_channels": 2, "layers_per_block": 3, "mid_block_add_attention": false,
                "use_post_quant_conv": false, "scaling_factor": 2, "latents_mean": [0.5, -1], "latents_std": [3, 4.5],
                "force_upcast": false, "act_fn": "swish", "some_future_field": {"a": []},
            }),
        ));
        let expected = AutoencoderKlConfig {
            decoder: DecoderConfig {
                latent_channels: 2,
                out_channels: 3,
                block_out_channels: vec![32, 64],
                layers_per_block: 3,
                norm_num_groups: 16,
                mid_block_add_attention: false,
            },
            use_post_quant_conv: false,
            scaling_factor: 2.0,
            shift_factor: None,
            latents_mean: Some(vec![0.5, -1.0]),
            latents_std: Some(vec![3.0, 4.5]),
            force_upcast: false,
        };
        assert_eq!(config.unwrap(), VaeConfig::AutoencoderKl(expected));

        let config = parse(with("AutoencoderKL", json!({"shift_factor": 0.25}))).unwrap();
        assert!(matches!(config, VaeConfig::AutoencoderKl(config) if config.shift_factor == Some(0.25)));
        let config = parse(with(
            "AutoencoderKLFlux2",
            json!({"batch_norm_eps": 0.01, "force_upcast": false}),
        ))
        .unwrap();
        assert!(!config.force_upcast());
        assert!(matches!(config, VaeConfig::Flux2(config) if config.batch_norm_eps == 0.01));
    }

    #[test]
    fn the_decoder_of_flux2_has_its_own_widths() {
        let changes = json!({"decoder_block_out_channels": [48, 96]});
        let config = parse(with("AutoencoderKLFlux2", changes.clone())).unwrap();
        assert_eq!(config.decoder().block_out_channels, [48, 96]);
        // AutoencoderKL has no such field.
        let config = parse(with("AutoencoderKL", changes)).unwrap();
        assert_eq!(config.decoder().block_out_channels, [32, 64]);
    }

    #[test]
    fn null_is_absent_only_where_python_has_none() {
        let nulls = json!({"shift_factor": null, "latents_mean": null, "latents_std": null});
        assert_eq!(
            parse(with("AutoencoderKL", nulls)).unwrap(),
            parse(with("AutoencoderKL", json!({}))).unwrap()
        );
        let null = json!({"decoder_block_out_channels": null});
        assert_eq!(
            parse(with("AutoencoderKLFlux2", null))
                .unwrap()
                .decoder()
                .block_out_channels,
            [32, 64]
        );
        let error = parse(with("AutoencoderKL", json!({"scaling_factor": null}))).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidFile { reason, .. } if reason.contains("scaling_factor")),
            "{error}"
        );
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_its_field() {
        let kl = |changes| refused(with("AutoencoderKL", changes));
        let flux2 = |changes| refused(with("AutoencoderKLFlux2", changes));
        let is = |field, value: &str| (field, value.to_owned());

        assert_eq!(
            refused(json!({"_class_name": "AutoencoderTiny"})),
            is("_class_name", "\"AutoencoderTiny\"")
        );
        assert_eq!(kl(json!({"act_fn": "gelu"})), is("act_fn", "\"gelu\""));
        let types = json!({"up_block_types": ["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]});
        assert_eq!(kl(types), is("up_block_types", "\"AttnUpDecoderBlock2D\""));
        assert_eq!(
            kl(json!({"up_block_types": ["UpDecoderBlock2D"]})),
            is("up_block_types", "a list of 1")
        );
        assert_eq!(
            kl(json!({"block_out_channels": [32]})),
            is("up_block_types", "a list of 2")
        );
        assert_eq!(kl(json!({"out_channels": 4})), is("out_channels", "4"));
        assert_eq!(kl(json!({"latent_channels": 0})), is("latent_channels", "0"));
        assert_eq!(kl(json!({"layers_per_block": 0})), is("layers_per_block", "0"));
        assert_eq!(kl(json!({"layers_per_block": 65})), is("layers_per_block", "65"));
        assert_eq!(kl(json!({"norm_num_groups": 0})), is("norm_num_groups", "0"));
        assert_eq!(
            kl(json!({"block_out_channels": [32, 0]})),
            is("block_out_channels", "0")
        );
        assert_eq!(
            kl(json!({"block_out_channels": [32, 65552]})),
            is("block_out_channels", "65552")
        );
        assert_eq!(
            kl(json!({"block_out_channels": [32, 40]})),
            is("block_out_channels", "[32, 40]")
        );
        let none = json!({"block_out_channels": [], "up_block_types": []});
        assert_eq!(kl(none), is("block_out_channels", "a list of 0"));
        let nine = json!({"block_out_channels": vec![32; 9], "up_block_types": vec!["UpDecoderBlock2D"; 9]});
        assert_eq!(kl(nine), is("block_out_channels", "a list of 9"));

        assert_eq!(kl(json!({"scaling_factor": 0.0})), is("scaling_factor", "0"));
        assert_eq!(kl(json!({"scaling_factor": 1e-45})).0, "scaling_factor");
        assert_eq!(kl(json!({"shift_factor": 1e300})).0, "shift_factor");
        let stats = |mean: Value, std: Value| kl(json!({"latents_mean": mean, "latents_std": std}));
        assert_eq!(
            stats(json!([0, 0, 0]), json!([1, 1, 1, 1])),
            is("latents_mean", "a list of 3")
        );
        assert_eq!(
            stats(json!([0, 0, 0, 0]), json!([1, 1, 1, 1, 1])),
            is("latents_std", "a list of 5")
        );
        assert_eq!(stats(json!([0, 0, 0, 0]), json!([1, 1, 0, 1])), is("latents_std", "0"));
        assert_eq!(stats(json!([0, 0, 0, 0]), json!(null)), is("latents_std", "absent"));
        assert_eq!(stats(json!(null), json!([1, 1, 1, 1])), is("latents_mean", "absent"));

        assert_eq!(flux2(json!({"patch_size": [2, 4]})), is("patch_size", "[2, 4]"));
        assert_eq!(flux2(json!({"patch_size": [2, 2, 2]})), is("patch_size", "a list of 3"));
        assert_eq!(flux2(json!({"batch_norm_eps": -1e-4})), is("batch_norm_eps", "-0.0001"));
        assert_eq!(
            flux2(json!({"decoder_block_out_channels": [32]})),
            is("up_block_types", "a list of 2")
        );
    }

    #[test]
    fn a_value_of_another_type_is_named() {
        for (field, value) in [
            ("latent_channels", json!(-4)),
            ("latent_channels", json!("4")),
            ("layers_per_block", json!(2.5)),
            ("block_out_channels", json!(64)),
            ("force_upcast", json!("true")),
            ("latents_mean", json!(["a"])),
            ("_class_name", json!(3)),
        ] {
            let error = parse(with("AutoencoderKL", json!({field: value})))
                .unwrap_err()
                .to_string();
            assert!(error.contains(field), "{error}");
        }
        for text in [
            "",
            "[]",
            "null",
            "{",
            "{\"scaling_factor\": NaN}",
            "{\"scaling_factor\": 1e999}",
        ] {
            assert!(
                matches!(VaeConfig::from_json(text), Err(Error::InvalidFile { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn a_config_without_its_class_is_told_by_its_fields_or_refused() {
        let class_of = |changes: Value| parse(changes).map(|config| config.family());
        assert_eq!(
            class_of(json!({"latent_channels": 32, "batch_norm_eps": 1e-4})).unwrap(),
            Some(Family::Flux2)
        );
        assert_eq!(class_of(json!({"latent_channels": 4})).unwrap(), Some(Family::Sd));
        assert!(matches!(
            class_of(json!({"hidden_size": 4})),
            Err(Error::UnknownFamily { .. })
        ));
    }

    proptest! {
        #[test]
        fn any_text_is_an_error(text in ".*") {
            prop_assert!(VaeConfig::from_json(&text).is_err());
        }

        #[test]
        fn any_numbers_are_refused_or_valid(
            flux2: bool,
            latent_channels in prop_oneof![Just(0usize), 1usize..64, any::<usize>()],
            widths in prop::collection::vec((0usize..2060).prop_map(|n| n * 32), 0..12),
            layers in 0usize..70,
            groups in prop::sample::select(vec![0usize, 8, 16, 32, 48]),
            scale in prop_oneof![Just(0.0), -1.0..1.0, any::<f64>()],
        ) {
            let class = if flux2 { "AutoencoderKLFlux2" } else { "AutoencoderKL" };
            let config = parse(json!({
                "_class_name": class, "latent_channels": latent_channels, "layers_per_block": layers,
                "block_out_channels": widths, "up_block_types": vec!["UpDecoderBlock2D"; widths.len()],
                "norm_num_groups": groups, "scaling_factor": scale, "batch_norm_eps": scale,
            }));
            if let Ok(config) = config {
                prop_assert!(config.decoder().block_out_channels.iter().all(|width| width % groups == 0));
                prop_assert!(config.decoder().upscale() <= 128);
            }
        }

        #[test]
        fn what_is_written_is_read(
            widths in prop::collection::vec((1usize..64).prop_map(|n| n * 4), 1..=8),
            layers in 1usize..=64,
            latent_channels in 1usize..=64,
            scale in 0.01f64..10.0,
            shift in prop::option::of(-1.0f64..1.0),
            flags: [bool; 3],
        ) {
            let config = AutoencoderKlConfig {
                decoder: DecoderConfig {
                    latent_channels, out_channels: 3, block_out_channels: widths.clone(), layers_per_block: layers,
                    norm_num_groups: 4, mid_block_add_attention: flags[0],
                },
                use_post_quant_conv: flags[1],
                scaling_factor: scale,
                shift_factor: shift,
                latents_mean: None,
                latents_std: None,
                force_upcast: flags[2],
            };
            let read = parse(json!({
                "_class_name": "AutoencoderKL", "latent_channels": latent_channels, "layers_per_block": layers,
                "block_out_channels": widths, "up_block_types": vec!["UpDecoderBlock2D"; widths.len()],
                "norm_num_groups": 4, "mid_block_add_attention": flags[0], "use_post_quant_conv": flags[1],
                "scaling_factor": scale, "shift_factor": shift, "force_upcast": flags[2],
            }));
            let Ok(VaeConfig::AutoencoderKl(read)) = read else { panic!("{read:?}") };
            // serde_json's default float parser may be one unit in the last place off.
            prop_assert!((read.scaling_factor - scale).abs() <= scale * 1e-15);
            prop_assert_eq!(AutoencoderKlConfig { scaling_factor: scale, shift_factor: shift, ..read }, config);
        }
    }
}

//! The program on sound input: the right picture, in the right file, with the right words. Everything runs on the CPU.

mod common;

use std::fs;

use common::*;

const MICRO_SD: (&str, &str) = ("micro-sd", WEIGHTS);

/// Decodes one file to a raw f32 image and gives it back.
#[track_caller]
fn raw(lab: &Lab, latents: &str, vae: &str, options: &[&str]) -> Tensor {
    let _ = fs::remove_file(lab.path("raw.safetensors"));
    lab.decode(&[&[latents, "--vae", vae, "-o", "raw.safetensors"], options].concat())
        .wrote(&["raw.safetensors"]);
    let image = lab.raw_image("raw.safetensors");
    fs::remove_file(lab.path("raw.safetensors")).unwrap();
    image
}

/// Decodes latents in VAE space to a raw f32 image.
#[track_caller]
fn raw_from_vae_space(vae: &str, latents: &Tensor, options: &[&str]) -> Tensor {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", latents);
    raw(&lab, file, vae, &[&["--latent-space", "vae"], options].concat())
}

// ---------------------------------------------------------------------------------------------------------------------
// Against diffusers

#[test]
fn micro_models_differ_from_diffusers_by_rounding_only() {
    for name in ["micro-sd", "micro-sd3", "micro-flux2-small", "micro-no-attention"] {
        let (latents, expected) = micro(name);
        assert_close(
            &raw_from_vae_space(&fixture(name), &latents, &[]),
            &expected,
            F32_TOLERANCE,
            name,
        );
    }
}

#[test]
fn another_key_style_is_not_another_picture() {
    let styles = [
        ("micro-sd", "ldm.safetensors"),
        ("micro-sd", "old_attention_names.safetensors"),
        ("micro-sd3", "ldm.safetensors"),
        ("micro-flux2-small", "bfl.safetensors"),
    ];
    for (name, file) in styles {
        let (latents, expected) = micro(name);
        let image = raw_from_vae_space(&fixture(&format!("{name}/{file}")), &latents, &[]);
        assert_close(&image, &expected, F32_TOLERANCE, &format!("{name}/{file}"));
        let diffusers = raw_from_vae_space(&fixture(name), &latents, &[]);
        assert_same_bits(&image, &diffusers, &format!("{name}/{file} against diffusers keys"));
    }
}

#[test]
fn a_full_checkpoint_is_read_with_a_config_from_elsewhere() {
    for name in ["micro-sd", "micro-sd3"] {
        let lab = Lab::new();
        lab.copy(&format!("{name}/full_checkpoint_ldm.safetensors"), "model.safetensors");
        lab.copy(&format!("{name}/config.json"), "elsewhere/vae.json");
        let (latents, expected) = micro(name);
        let file = lab.latents("z.safetensors", &latents);
        let options = ["--latent-space", "vae", "--config", "elsewhere/vae.json"];
        let image = raw(&lab, file, "model.safetensors", &options);
        assert_close(&image, &expected, F32_TOLERANCE, name);
        assert_same_bits(&image, &raw_from_vae_space(&fixture(name), &latents, &[]), name);
    }
}

#[test]
fn a_vae_prefix_on_the_keys_is_stripped() {
    let lab = Lab::new();
    let vae = lab.model("prefixed", MICRO_SD, |tensors, _| {
        *tensors = std::mem::take(tensors)
            .into_iter()
            .map(|(key, tensor)| (format!("vae.{key}"), tensor))
            .collect();
    });
    let (latents, _) = micro("micro-sd");
    let file = lab.latents("z.safetensors", &latents);
    let image = raw(&lab, file, vae, &["--latent-space", "vae"]);
    assert_same_bits(
        &image,
        &raw_from_vae_space(&fixture("micro-sd"), &latents, &[]),
        "vae. keys",
    );
}

#[test]
fn half_precision_weights_are_widened_not_computed_with() {
    let (latents, _) = micro("micro-sd");
    for dtype in [Dtype::F16, Dtype::BF16] {
        let lab = Lab::new();
        let file = lab.latents("z.safetensors", &latents);
        let narrow = lab.model("narrow", MICRO_SD, |tensors, _| {
            tensors.values_mut().for_each(|t| *t = t.cast(dtype));
        });
        let wide = lab.model("wide", MICRO_SD, |tensors, _| {
            tensors.values_mut().for_each(|t| *t = t.cast(dtype).cast(Dtype::F32));
        });
        let options = ["--latent-space", "vae"];
        let (narrow, wide) = (raw(&lab, file, narrow, &options), raw(&lab, file, wide, &options));
        assert_same_bits(&narrow, &wide, &format!("{dtype:?} weights"));
    }
}

#[test]
fn shards_are_put_together_by_their_index() {
    let lab = Lab::new();
    let vae = lab.model("sharded", MICRO_SD, |_, _| ());
    let whole = read_safetensors(lab.path("sharded").join(WEIGHTS));
    fs::remove_file(lab.path("sharded").join(WEIGHTS)).unwrap();
    let shard_of = |i: usize| format!("diffusion_pytorch_model-0000{}-of-00002.safetensors", i % 2 + 1);
    let mut map = serde_json::Map::new();
    let mut shards = [Tensors::new(), Tensors::new()];
    for (i, (key, tensor)) in whole.into_iter().enumerate() {
        map.insert(key.clone(), json!(shard_of(i)));
        shards[i % 2].insert(key, tensor);
    }
    for (i, shard) in shards.iter().enumerate() {
        lab.weights(&format!("sharded/{}", shard_of(i)), shard);
    }
    let index = json!({"metadata": {"total_size": 414508}, "weight_map": map});
    lab.write(&format!("sharded/{WEIGHTS}.index.json"), index.to_string());
    let (latents, _) = micro("micro-sd");
    let file = lab.latents("z.safetensors", &latents);
    let image = raw(&lab, file, vae, &["--latent-space", "vae"]);
    assert_same_bits(
        &image,
        &raw_from_vae_space(&fixture("micro-sd"), &latents, &[]),
        "two shards",
    );
}

#[test]
fn f32_pictures_differ_from_diffusers_by_rounding_only() {
    for name in ["flux2-tiny", "flux1-tiny", "sd-tiny"] {
        let image = raw(
            &Lab::new(),
            &fixture(&format!("{name}/latents/chelsea.safetensors")),
            &fixture(name),
            &[],
        );
        let expected = &read_safetensors(fixture(&format!("{name}/chelsea.expected.safetensors")))["image"];
        assert_close(&image, expected, F32_TOLERANCE, name);
    }
}

#[test]
fn pngs_are_rounded_as_diffusers_rounds_them() {
    for name in ["flux2-tiny", "flux1-tiny", "sd-tiny"] {
        let lab = Lab::new();
        let latents = ["astronaut", "chelsea", "coffee"].map(|of| fixture(&format!("{name}/latents/{of}.safetensors")));
        lab.decode(&[&latents[0], &latents[1], &latents[2], "--vae", &fixture(name)])
            .wrote(&["astronaut.png", "chelsea.png", "coffee.png"]);
        for picture in ["astronaut.png", "chelsea.png", "coffee.png"] {
            let what = format!("{name}/{picture}");
            assert_same_picture(&read_picture(lab.path(picture)), &read_picture(fixture(&what)), &what);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Latents: layouts and spaces

#[test]
fn packed_tokens_are_not_another_picture() {
    for name in ["flux2-tiny", "flux1-tiny"] {
        let lab = Lab::new();
        let tokens = fixture(&format!("{name}/latents/coffee.packed-tokens.safetensors"));
        lab.decode(&[&tokens, "--vae", &fixture(name)])
            .wrote(&["coffee.packed-tokens.png"]);
        let picture = read_picture(lab.path("coffee.packed-tokens.png"));
        assert_same_picture(&picture, &read_picture(fixture(&format!("{name}/coffee.png"))), name);
    }
}

#[test]
fn vae_space_latents_of_flux2_skip_the_batch_norm() {
    let latents = fixture("flux2-tiny/latents/chelsea.vae-space.safetensors");
    let image = raw(&Lab::new(), &latents, &fixture("flux2-tiny"), &[]);
    let expected = &read_safetensors(fixture("flux2-tiny/chelsea.expected.safetensors"))["image"];
    assert_close(&image, expected, F32_TOLERANCE, "32 channels, space inferred");
}

/// tests/tests/cpu.rs decodes the files of the other models.
#[test]
fn what_numpy_and_pytorch_saved_are_the_same_latents() {
    let expected = &read_safetensors(fixture("sd-tiny/chelsea.expected.safetensors"))["image"];
    for extension in ["npy", "npz", "pt"] {
        let file = fixture(&format!("sd-tiny/latents/chelsea.{extension}"));
        let image = raw(&Lab::new(), &file, &fixture("sd-tiny"), &[]);
        assert_close(&image, expected, F32_TOLERANCE, extension);
    }
}

#[test]
fn standard_input_decodes_to_latents_png_or_to_the_output() {
    let vae = fixture("micro-no-attention");
    let z = Tensor::wave(&[1, 4, 5, 9]);
    let lab = Lab::new();
    lab.latents("z.safetensors", &z);
    lab.write("z.npy", npy(&z));
    lab.decode(&["z.safetensors", "--vae", &vae, "-o", "expected.png"]);
    let expected = fs::read(lab.path("expected.png")).unwrap();
    for file in ["z.safetensors", "z.npy"] {
        for (options, output) in [(&[][..], "latents.png"), (&["-o", "out.png"], "out.png")] {
            let mut command = lab.command();
            command
                .args(["-", "--vae", &vae, "--device", "cpu", "--json"])
                .args(options);
            let run = lab.run(command.stdin(fs::File::open(lab.path(file)).unwrap()));
            run.wrote(&[output]);
            assert_eq!(run.json_field("input"), json!("-"), "{run}");
            assert!(run.stderr.contains("standard input: diffusion space"), "{run}");
            assert!(fs::read(lab.path(output)).unwrap() == expected, "{file} {options:?}");
            fs::remove_file(lab.path(output)).unwrap();
        }
    }
}

#[test]
fn standard_input_is_one_input_of_several() {
    let lab = Lab::new();
    let (latents, _) = micro("micro-sd");
    let pair = lab.latents("pair.safetensors", &latents);
    let mut command = lab.command();
    command.args([pair, "-", "--vae", &fixture("micro-sd"), "--device", "cpu"]);
    lab.run(command.stdin(fs::File::open(lab.path(pair)).unwrap())).wrote(&[
        "pair_0.png",
        "pair_1.png",
        "latents_0.png",
        "latents_1.png",
    ]);
    for i in 0..2 {
        let read = |name: &str| fs::read(lab.path(format!("{name}_{i}.png"))).unwrap();
        assert!(read("pair") == read("latents"), "image {i}");
    }
}

#[test]
fn a_file_called_minus_is_not_standard_input() {
    let lab = Lab::new();
    lab.latents("-", &Tensor::wave(&[1, 4, 5, 9]));
    lab.decode(&["./-", "--vae", &fixture("micro-no-attention")])
        .wrote(&["-.png"]);
}

#[test]
fn the_tensor_asked_for_is_the_one_decoded() {
    let lab = Lab::new();
    let vae = fixture("micro-no-attention");
    let (one, other) = (Tensor::wave(&[1, 4, 5, 9]), Tensor::wave(&[1, 4, 5, 9]).map(|_, x| -x));
    let several = safetensors_bytes([("latents", &one), ("step_1", &other)], &[]);
    let several = lab.write("several.safetensors", several);
    lab.latents("one.safetensors", &one);
    lab.latents("other.safetensors", &other);
    let (one, other) = (
        raw(&lab, "one.safetensors", &vae, &[]),
        raw(&lab, "other.safetensors", &vae, &[]),
    );
    assert_same_bits(&raw(&lab, several, &vae, &[]), &one, "by default");
    let latents = raw(&lab, several, &vae, &["--tensor", "latents"]);
    assert_same_bits(&latents, &one, "--tensor latents");
    let step_1 = raw(&lab, several, &vae, &["--tensor", "step_1"]);
    assert_same_bits(&step_1, &other, "--tensor step_1");
    assert!(one != other, "test bug: they must differ");
}

#[test]
fn the_scale_and_the_shift_of_the_config_are_undone() {
    for (name, scale, shift) in [
        ("micro-sd", 0.18215, 0.0),
        ("micro-no-attention", 0.18215, 0.0),
        ("micro-sd3", 1.5305, 0.0609),
    ] {
        let lab = Lab::new();
        let (latents, expected) = micro(name);
        let file = lab.latents("scaled.safetensors", &latents.map(|_, z| (z - shift) * scale));
        for options in [&[][..], &["--latent-space", "auto"], &["--latent-space", "diffusion"]] {
            let image = raw(&lab, file, &fixture(name), options);
            assert_close(&image, &expected, ROUND_TRIP_TOLERANCE, &format!("{name} {options:?}"));
        }
    }
}

#[test]
fn an_old_config_without_a_scale_means_the_scale_of_sd() {
    let lab = Lab::new();
    let vae = lab.model("old", MICRO_SD, |_, config| {
        config.as_object_mut().unwrap().remove("scaling_factor");
    });
    let (latents, expected) = micro("micro-sd");
    let file = lab.latents("scaled.safetensors", &latents.map(|_, z| z * 0.18215));
    assert_close(
        &raw(&lab, file, vae, &[]),
        &expected,
        ROUND_TRIP_TOLERANCE,
        "no scaling_factor",
    );
}

#[test]
fn nulls_and_notes_in_a_config_do_no_harm() {
    let lab = Lab::new();
    let vae = lab.model("current", MICRO_SD, |_, config| {
        for key in ["shift_factor", "latents_mean", "latents_std"] {
            config[key] = Value::Null;
        }
        config["_name_or_path"] = json!("/somewhere/vae");
    });
    let (latents, expected) = micro("micro-sd");
    let file = lab.latents("scaled.safetensors", &latents.map(|_, z| z * 0.18215));
    assert_close(
        &raw(&lab, file, vae, &[]),
        &expected,
        ROUND_TRIP_TOLERANCE,
        "a config with nulls",
    );
}

/// Playground 2.5: z*std/scale + mean.
#[test]
fn latents_mean_and_std_are_never_ignored() {
    const SCALE: f32 = 0.5;
    const MEAN: [f32; 4] = [-1.6574, 1.886, -1.383, 2.5155];
    const STD: [f32; 4] = [8.4927, 5.9022, 6.5498, 5.2299];
    let lab = Lab::new();
    let vae = lab.model("playground", MICRO_SD, |_, config| {
        config["scaling_factor"] = json!(SCALE);
        config["latents_mean"] = json!(MEAN);
        config["latents_std"] = json!(STD);
    });
    let (latents, expected) = micro("micro-sd");
    let normalised = latents.map_channels(|c, z| (z - MEAN[c]) * SCALE / STD[c]);
    let file = lab.latents("normalised.safetensors", &normalised);
    let image = raw(&lab, file, vae, &[]);
    assert_close(&image, &expected, ROUND_TRIP_TOLERANCE, "latents_mean and latents_std");
}

/// FLUX.2's 128-channel map and its tokens: de-normalised with the checkpoint's statistics, then unpatchified. The size
/// of the picture is in pixels of this model, whose factor is 4, not FLUX.2's 16.
#[test]
fn flux2_maps_and_tokens_are_denormalised_and_unpatchified() {
    let (latents, expected) = micro("micro-flux2-small");
    let weights = read_safetensors(fixture(&format!("micro-flux2-small/{WEIGHTS}")));
    let (mean, var) = (weights["bn.running_mean"].values(), weights["bn.running_var"].values());
    let map = latents
        .patchified()
        .map_channels(|c, z| (z - mean[c]) / (var[c] + 1e-4).sqrt());
    let vae = fixture("micro-flux2-small");
    let lab = Lab::new();

    let image = raw(&lab, lab.latents("map.safetensors", &map), &vae, &[]);
    assert_close(&image, &expected, ROUND_TRIP_TOLERANCE, "a map");

    let size = ["--height", "20", "--width", "12"];
    let tokens = lab.latents("tokens.safetensors", &map.tokens());
    assert_same_bits(
        &raw(&lab, tokens, &vae, &size),
        &image,
        "tokens, size on the command line",
    );
    let tokens = lab.write("tokens.npy", npy(&map.tokens()));
    assert_same_bits(&raw(&lab, tokens, &vae, &size), &image, "tokens in .npy");
    let sized = safetensors_bytes([("latents", &map.tokens())], &[("height", "20"), ("width", "12")]);
    let tokens = lab.write("sized.safetensors", sized);
    assert_same_bits(&raw(&lab, tokens, &vae, &[]), &image, "tokens, size in the metadata");
}

#[test]
fn flux1_tokens_need_a_size_and_no_more() {
    let (vae, map) = (fixture("flux1-tiny"), Tensor::wave(&[1, 16, 4, 6]));
    let lab = Lab::new();
    let expected = raw(&lab, lab.latents("map.safetensors", &map), &vae, &[]);
    let tokens = lab.latents("tokens.safetensors", &map.patchified().tokens());
    let image = raw(&lab, tokens, &vae, &["--height", "32", "--width", "48"]);
    assert_same_bits(&image, &expected, "tokens against a map");
}

#[test]
fn square_flux2_tokens_need_no_size() {
    let (vae, map) = (fixture("micro-flux2-small"), Tensor::wave(&[1, 128, 4, 4]));
    let lab = Lab::new();
    let expected = raw(&lab, lab.latents("map.safetensors", &map), &vae, &[]);
    let image = raw(&lab, lab.latents("tokens.safetensors", &map.tokens()), &vae, &[]);
    assert_same_bits(&image, &expected, "16 tokens against a 4x4 map");
}

#[test]
fn a_time_axis_of_one_is_dropped() {
    let (latents, _) = micro("micro-sd");
    let lab = Lab::new();
    let file = lab.latents("video.safetensors", &latents.reshaped(&[2, 4, 1, 7, 5]));
    let image = raw(&lab, file, &fixture("micro-sd"), &["--latent-space", "vae"]);
    assert_same_bits(
        &image,
        &raw_from_vae_space(&fixture("micro-sd"), &latents, &[]),
        "[2,4,1,7,5]",
    );
}

#[test]
fn half_precision_latents_are_read_exactly() {
    let (latents, _) = micro("micro-sd");
    for dtype in [Dtype::F16, Dtype::BF16] {
        let narrow = raw_from_vae_space(&fixture("micro-sd"), &latents.cast(dtype), &[]);
        let wide = raw_from_vae_space(&fixture("micro-sd"), &latents.cast(dtype).cast(Dtype::F32), &[]);
        assert_same_bits(&narrow, &wide, &format!("{dtype:?} latents"));
    }
    let lab = Lab::new();
    let half = latents.cast(Dtype::F16);
    let file = lab.write("half.npy", npy_bytes("<f2", false, &tuple(&half.shape), &half.bytes));
    let image = raw(&lab, file, &fixture("micro-sd"), &["--latent-space", "vae"]);
    assert_same_bits(
        &image,
        &raw_from_vae_space(&fixture("micro-sd"), &half, &[]),
        "f16 in .npy",
    );
}

#[test]
fn fortran_order_and_big_endian_are_not_misread() {
    let (latents, expected) = micro("micro-sd");
    let [b, c, h, w] = latents.shape[..] else {
        unreachable!()
    };
    let x = latents.values();
    let columns_first = (0..x.len()).map(|i| {
        let (image, channel, row, column) = (i % b, i / b % c, i / (b * c) % h, i / (b * c * h));
        x[((image * c + channel) * h + row) * w + column]
    });
    let fortran: Vec<u8> = columns_first.flat_map(f32::to_le_bytes).collect();
    let big_endian: Vec<u8> = x.iter().flat_map(|x| x.to_be_bytes()).collect();
    let shape = tuple(&latents.shape);
    let files = [
        ("fortran.npy", npy_bytes("<f4", true, &shape, &fortran)),
        ("big-endian.npy", npy_bytes(">f4", false, &shape, &big_endian)),
    ];
    for (name, bytes) in files {
        let lab = Lab::new();
        let file = lab.write(name, bytes);
        let image = raw(&lab, file, &fixture("micro-sd"), &["--latent-space", "vae"]);
        assert_close(&image, &expected, F32_TOLERANCE, name);
    }
}

#[test]
fn a_size_that_agrees_with_the_map_is_accepted() {
    let (latents, _) = micro("micro-sd");
    let image = raw_from_vae_space(&fixture("micro-sd"), &latents, &["--height", "14", "--width", "10"]);
    assert_eq!(image.shape, [2, 3, 14, 10]);
}

#[test]
fn the_smallest_latents_decode() {
    for (name, channels, factor) in [("micro-sd", 4, 2), ("micro-sd3", 16, 4)] {
        let image = raw_from_vae_space(&fixture(name), &Tensor::wave(&[1, channels, 1, 1]), &[]);
        assert_eq!(image.shape, [1, 3, factor, factor], "{name}");
        assert!(image.values().iter().all(|x| x.is_finite()), "{name}");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Families without a config

#[test]
fn without_a_config_the_family_gives_the_scale() {
    let cases = [
        ("flux1-tiny", "ae.safetensors", "flux1", 16),
        ("sd-tiny", WEIGHTS, "sd", 4),
    ];
    for (name, weights, family, channels) in cases {
        let lab = Lab::new();
        let file = lab.latents("z.safetensors", &Tensor::wave(&[1, channels, 2, 3]));
        let alone = lab.copy(&format!("{name}/{weights}"), "alone/weights.safetensors");
        let expected = raw(&lab, file, &fixture(name), &[]);
        let image = raw(&lab, file, alone, &["--family", family]);
        assert_same_bits(&image, &expected, &format!("{name} with --family {family}"));
    }
}

#[test]
fn flux2_is_recognised_without_a_config() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 128, 2, 3]));
    let alone = lab.copy(&format!("flux2-tiny/{WEIGHTS}"), "alone/weights.safetensors");
    let expected = raw(&lab, file, &fixture("flux2-tiny"), &[]);
    assert_same_bits(&raw(&lab, file, alone, &[]), &expected, "flux2 from the tensors alone");
}

/// The scale of another family is a plausible, wrong picture: sdxl must divide by 0.13025, sd by 0.18215.
#[test]
fn the_families_of_one_channel_count_have_their_own_scales() {
    let lab = Lab::new();
    let z = Tensor::wave(&[1, 4, 2, 3]);
    let vae = lab.copy(&format!("sd-tiny/{WEIGHTS}"), "alone/weights.safetensors");
    let vae_space = lab.latents("vae-space.safetensors", &z);
    let expected = raw(&lab, vae_space, vae, &["--family", "sd", "--latent-space", "vae"]);
    for (family, scale) in [("sd", 0.18215), ("sdxl", 0.13025)] {
        let file = lab.latents("scaled.safetensors", &z.map(|_, x| x * scale));
        let image = raw(&lab, file, vae, &["--family", family]);
        assert_close(&image, &expected, ROUND_TRIP_TOLERANCE, family);
    }

    let z = Tensor::wave(&[1, 16, 2, 3]);
    let vae = lab.copy("flux1-tiny/ae.safetensors", "bfl/ae.safetensors");
    let vae_space = lab.latents("vae-space.safetensors", &z);
    let expected = raw(&lab, vae_space, vae, &["--family", "sd3", "--latent-space", "vae"]);
    for (family, scale, shift) in [("sd3", 1.5305, 0.0609), ("flux1", 0.3611, 0.1159)] {
        let file = lab.latents("scaled.safetensors", &z.map(|_, x| (x - shift) * scale));
        let image = raw(&lab, file, vae, &["--family", family]);
        assert_close(&image, &expected, ROUND_TRIP_TOLERANCE, family);
    }
}

/// A config.json of something else beside a single file (a transformer's, say) is not the VAE's: as good as none.
#[test]
fn the_config_of_another_model_beside_the_file_is_left_alone() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 2, 3]));
    let vae = lab.copy(&format!("sd-tiny/{WEIGHTS}"), "beside/vae.safetensors");
    lab.write(
        "beside/config.json",
        json!({"_class_name": "UNet2DConditionModel", "in_channels": 4}).to_string(),
    );
    let expected = raw(&lab, file, &fixture("sd-tiny"), &[]);
    assert_same_bits(
        &raw(&lab, file, vae, &["--family", "sd"]),
        &expected,
        "beside a UNet's config",
    );
}

/// micro-sd cannot be read without a config: nothing else tells its groups and its scale.
#[test]
fn a_config_without_a_class_beside_the_file_is_not_ignored() {
    let lab = Lab::new();
    lab.model("beside", MICRO_SD, |_, config| {
        config.as_object_mut().unwrap().remove("_class_name");
    });
    let file = lab.latents("z.safetensors", &micro("micro-sd").0);
    let image = raw(&lab, file, &format!("beside/{WEIGHTS}"), &[]);
    let expected = raw(&lab, file, &fixture("micro-sd"), &[]);
    assert_same_bits(&image, &expected, "a config without _class_name");
}

// ---------------------------------------------------------------------------------------------------------------------
// Outputs

#[test]
fn a_batch_gives_one_numbered_picture_an_image() {
    let lab = Lab::new();
    let (latents, expected) = micro("micro-sd");
    let file = lab.latents("pair.safetensors", &latents);
    lab.folder("pictures");
    let run = lab.decode(&[
        file,
        "--vae",
        &fixture("micro-sd"),
        "--latent-space",
        "vae",
        "-o",
        "pictures",
    ]);
    run.wrote(&["pictures/pair_0.png", "pictures/pair_1.png"]);
    for i in 0..2 {
        let picture = read_picture(lab.path(format!("pictures/pair_{i}.png")));
        let (worst, identical) = picture_difference(&picture, &expected.picture(i), "pair");
        assert!(
            worst <= 1 && identical >= 990.0,
            "image {i} of the batch: off by {worst}, {identical} of 1000 identical"
        );
    }
}

#[test]
fn a_batch_under_one_picture_name_loses_no_image() {
    let lab = Lab::new();
    let file = lab.latents("pair.safetensors", &micro("micro-sd").0);
    let run = lab.decode(&[
        file,
        "--vae",
        &fixture("micro-sd"),
        "--latent-space",
        "vae",
        "-o",
        "out.png",
    ]);
    run.wrote(&["out_0.png", "out_1.png"]);
}

#[test]
fn an_image_does_not_change_the_bits_of_another_in_its_batch() {
    let lab = Lab::new();
    let vae = fixture("micro-sd");
    let decoded = |latents: &Tensor, out: &str| {
        let file = lab.latents("z.safetensors", latents);
        lab.decode(&[file, "--vae", &vae, "--latent-space", "vae", "-o", out])
            .wrote(&[out]);
        read_npy(lab.path(out))
    };
    let (latents, _) = micro("micro-sd");
    let pair = decoded(&latents, "pair.npy");
    for i in 0..2 {
        let alone = decoded(&latents.one_of_batch(i), &format!("alone_{i}.npy"));
        assert_same_bits(&pair.one_of_batch(i), &alone, &format!("image {i} of the batch"));
    }
}

#[test]
fn without_an_output_the_picture_lands_in_the_current_folder() {
    let lab = Lab::new();
    let file = lab.latents("elsewhere/one.safetensors", &micro("micro-no-attention").0);
    let vae = fixture("micro-no-attention");
    lab.decode(&[file, "--vae", &vae, "--latent-space", "vae"])
        .wrote(&["one.png"]);
    let file = lab.latents("elsewhere/pair.safetensors", &micro("micro-sd").0);
    let run = lab.decode(&[file, "--vae", &fixture("micro-sd"), "--latent-space", "vae"]);
    run.wrote(&["pair_0.png", "pair_1.png"]);
}

#[test]
fn dots_spaces_and_accents_in_a_name_are_part_of_it() {
    let lab = Lab::new();
    let (latents, _) = micro("micro-no-attention");
    let one = lab.latents("step.050.safetensors", &latents);
    let two = lab.latents("chat noir, été.safetensors", &latents);
    let run = lab.decode(&[
        one,
        two,
        "--vae",
        &fixture("micro-no-attention"),
        "--latent-space",
        "vae",
    ]);
    run.wrote(&["step.050.png", "chat noir, été.png"]);
}

/// Linux only: macOS has no such names.
#[cfg(target_os = "linux")]
#[test]
fn a_name_that_is_not_utf8_keeps_its_bytes() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let lab = Lab::new();
    let latents = OsStr::from_bytes(b"caf\xe9.safetensors");
    lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 5, 9]));
    fs::rename(lab.path("z.safetensors"), lab.path(latents)).unwrap();
    let vae = fixture("micro-no-attention");
    let options = ["--vae", &vae, "--device", "cpu", "--json"];
    let run = lab.run(lab.command().arg(latents).args(options));
    run.wrote(&["caf\u{fffd}.png"]); // as the harness prints it
    read_picture(lab.path(OsStr::from_bytes(b"caf\xe9.png")));
    assert_eq!(run.json_field("output"), json!("caf\u{fffd}.png"), "{run}");
}

#[test]
fn an_existing_folder_is_a_folder_whatever_its_name() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &micro("micro-no-attention").0);
    for folder in ["plain", "run.v2", "slash/"] {
        lab.folder(folder);
        let vae = fixture("micro-no-attention");
        let run = lab.decode(&[file, "--vae", &vae, "--latent-space", "vae", "-o", folder]);
        run.wrote(&[&format!("{}/one.png", folder.trim_end_matches('/'))]);
    }
}

#[test]
fn a_trailing_slash_makes_a_folder_never_a_file() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &micro("micro-no-attention").0);
    for out in ["new/", "new.png/"] {
        let run = lab.decode(&[
            file,
            "--vae",
            &fixture("micro-no-attention"),
            "--latent-space",
            "vae",
            "-o",
            out,
        ]);
        run.wrote(&[&format!("{out}one.png")]);
    }
}

#[test]
fn the_extension_chooses_the_format() {
    let lab = Lab::new();
    let (latents, expected) = micro("micro-no-attention");
    let file = lab.latents("one.safetensors", &latents);
    let vae = fixture("micro-no-attention");
    let expected = expected.picture(0);
    for (name, magic, offset) in [
        ("one.png", &b"\x89PNG"[..], 0),
        ("one.PNG", &b"\x89PNG"[..], 0),
        ("one.jpg", &b"\xff\xd8\xff"[..], 0),
        ("one.webp", &b"WEBP"[..], 8),
    ] {
        lab.decode(&[file, "--vae", &vae, "--latent-space", "vae", "-o", name])
            .wrote(&[name]);
        let bytes = fs::read(lab.path(name)).unwrap();
        assert!(
            bytes[offset..].starts_with(magic),
            "{name} starts with {:x?}",
            &bytes[..12]
        );
        let picture = read_picture(lab.path(name));
        assert_eq!(picture.dimensions(), (18, 10), "{name}");
        // The picture is nearly noise, which JPEG blurs; channels in another order would still be 50 off on average.
        let sum: u64 = picture
            .iter()
            .zip(expected.iter())
            .map(|(a, b)| u64::from(a.abs_diff(*b)))
            .sum();
        let mean = sum as f64 / expected.len() as f64;
        assert!(mean < 20.0, "{name} is off by {mean} on average");
    }
}

#[test]
fn pngs_have_no_gamma_to_shift_their_colours() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &micro("micro-no-attention").0);
    lab.decode(&[file, "--vae", &fixture("micro-no-attention"), "--latent-space", "vae"])
        .wrote(&["one.png"]);
    let chunks = png_chunks(&fs::read(lab.path("one.png")).unwrap());
    assert!(!chunks.iter().any(|chunk| chunk == "gAMA"), "{chunks:?}");
    read_picture(lab.path("one.png")); // 8-bit RGB, no alpha
}

#[test]
fn raw_images_hold_the_whole_batch_unclamped() {
    let lab = Lab::new();
    let (latents, expected) = micro("micro-sd");
    let file = lab.latents("pair.safetensors", &latents);
    let options = [file, "--vae", &fixture("micro-sd"), "--latent-space", "vae", "-o"];
    lab.decode(&[&options[..], &["out.safetensors"]].concat())
        .wrote(&["out.safetensors"]);
    lab.decode(&[&options[..], &["out.npy"]].concat()).wrote(&["out.npy"]);
    let (image, array) = (lab.raw_image("out.safetensors"), read_npy(lab.path("out.npy")));
    assert_close(&image, &expected, F32_TOLERANCE, "out.safetensors");
    assert_same_bits(&array, &image, "out.npy against out.safetensors");
    assert!(
        expected.values().iter().any(|x| x.abs() > 1.5),
        "test bug: this fixture must go beyond -1..1"
    );
}

#[test]
fn force_replaces_the_picture() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &micro("micro-no-attention").0);
    lab.write("one.png", "an older picture");
    let run = lab.decode(&[
        file,
        "--vae",
        &fixture("micro-no-attention"),
        "--latent-space",
        "vae",
        "--force",
    ]);
    run.wrote(&["one.png"]);
    read_picture(lab.path("one.png"));
}

#[test]
fn two_runs_give_the_same_bytes() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &micro("micro-sd3").0);
    for folder in ["a", "b"] {
        let out = format!("{folder}/");
        lab.folder(folder);
        let run = lab.decode(&[
            file,
            "--vae",
            &fixture("micro-sd3"),
            "--latent-space",
            "vae",
            "-o",
            &out,
        ]);
        run.wrote(&[&format!("{folder}/z_0.png"), &format!("{folder}/z_1.png")]);
    }
    for i in 0..2 {
        let read = |folder: &str| fs::read(lab.path(format!("{folder}/z_{i}.png"))).unwrap();
        assert!(read("a") == read("b"), "image {i} differs between two runs");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What it says

#[test]
fn stdout_is_for_json_alone() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 5, 9]));
    let vae = fixture("micro-no-attention");
    for (options, out) in [
        (&[][..], "plain.png"),
        (&["--explain"], "explained.png"),
        (&["-q"], "quiet.png"),
    ] {
        let run = lab.decode(&[&[file, "--vae", &vae, "-o", out], options].concat());
        run.wrote(&[out]);
        assert_eq!(run.stdout, "", "{options:?} wrote to stdout\n{run}");
    }
}

#[test]
fn what_was_inferred_is_said_unless_quiet() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 5, 9]));
    let vae = fixture("micro-no-attention");
    let run = lab.decode(&[file, "--vae", &vae]);
    run.wrote(&["one.png"]);
    assert!(
        run.stderr.to_lowercase().contains("diffusion"),
        "the inferred space is not named\n{run}"
    );
    let run = lab.decode(&[file, "--vae", &vae, "-o", "quiet.png", "-q"]);
    run.wrote(&["quiet.png"]);
    assert_eq!(run.stderr, "", "-q is not quiet\n{run}");
}

/// `eprintln!` would panic.
#[cfg(target_os = "linux")]
#[test]
fn words_that_cannot_be_said_do_not_cost_the_picture() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 5, 9]));
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let vae = fixture("micro-no-attention");
    let args = [file, "--vae", &vae, "--device", "cpu", "--explain"];
    lab.run(lab.command().args(args).stderr(full)).wrote(&["one.png"]);
    read_picture(lab.path("one.png"));
}

/// The plan names what ran, and the image is the other quality's but for rounding.
#[test]
fn quality_high_runs_what_the_plan_says_and_matches_lossless() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 5, 9]));
    let args = [file, "--vae", &fixture("micro-sd"), "--json", "--explain", "-o"];
    let lossless = lab.decode(&[&args[..], &["lossless.safetensors"]].concat());
    lossless.wrote(&["lossless.safetensors"]);
    let high = lab.decode(&[&args[..], &["high.safetensors", "--quality", "high"]].concat());
    high.wrote(&["high.safetensors"]);
    assert!(lossless.stderr.contains("stock Burn operations"), "{lossless}");
    assert!(
        high.stderr.contains("fused") && !high.stderr.contains("stock"),
        "{high}"
    );
    assert!(high.stdout.contains(r#""quality":"high""#), "{high}");
    let (lossless, high) = (lab.raw_image("lossless.safetensors"), lab.raw_image("high.safetensors"));
    let (lossless, high) = (lossless.values(), high.values());
    let differences = lossless.iter().zip(&high).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    assert!(largest > 0.0 && largest <= 5e-5, "largest difference {largest}");
}

#[test]
fn explain_prints_the_plan_and_changes_nothing() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 5, 9]));
    let args = [file, "--vae", &fixture("micro-no-attention"), "-o"];
    let plain = lab.decode(&[&args[..], &["plain.safetensors"]].concat());
    plain.wrote(&["plain.safetensors"]);
    let explained = lab.decode(&[&args[..], &["explained.safetensors", "--explain"]].concat());
    explained.wrote(&["explained.safetensors"]);
    let (few, many) = (plain.stderr.lines().count(), explained.stderr.lines().count());
    assert!(
        many >= few + 5,
        "a plan site by site is more than {} lines\n{explained}",
        many - few.min(many)
    );
    assert!(
        explained.stderr.contains("conv"),
        "a plan without a convolution\n{explained}"
    );
    let (plain, explained) = (
        lab.raw_image("plain.safetensors"),
        lab.raw_image("explained.safetensors"),
    );
    assert_same_bits(&explained, &plain, "--explain");
}

const JSON_KEYS: [&str; 13] = [
    "input",
    "output",
    "family",
    "space",
    "width",
    "height",
    "device",
    "dtype",
    "quality",
    "load_s",
    "decode_s",
    "write_s",
    "peak_bytes",
];

#[test]
fn json_has_one_complete_line_an_image() {
    let lab = Lab::new();
    let pair = lab.latents("pair.safetensors", &Tensor::wave(&[2, 4, 7, 5]));
    let one = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 3, 8]));
    lab.folder("out");
    let run = lab.decode(&[pair, one, "--vae", &fixture("micro-sd"), "-o", "out", "--json"]);
    run.wrote(&["out/pair_0.png", "out/pair_1.png", "out/one.png"]);
    let lines = run.json();
    let expected = [
        ("pair.safetensors", "pair_0.png", 10, 14),
        ("pair.safetensors", "pair_1.png", 10, 14),
        ("one.safetensors", "one.png", 16, 6),
    ];
    assert_eq!(lines.len(), expected.len(), "one line an image\n{run}");
    for (line, (input, output, width, height)) in lines.iter().zip(expected) {
        for key in JSON_KEYS {
            assert!(line.get(key).is_some(), "no {key:?} in {line}\n{run}");
        }
        let text = |key: &str| {
            line[key]
                .as_str()
                .unwrap_or_else(|| panic!("{key} is not a string in {line}\n{run}"))
        };
        assert!(text("input").ends_with(input), "input of {line}");
        assert!(text("output").ends_with(output), "output of {line}");
        assert!(
            lab.path(text("output")).is_file(),
            "there is no file {}",
            text("output")
        );
        assert_eq!(line["width"], json!(width), "{line}");
        assert_eq!(line["height"], json!(height), "{line}");
        assert_eq!(text("family"), "sd", "{line}");
        assert_eq!(text("space"), "diffusion", "{line}");
        assert!(text("device").starts_with("cpu"), "{line}");
        assert_eq!(text("dtype"), "f32", "{line}");
        assert_eq!(text("quality"), "lossless", "{line}");
        for key in ["load_s", "decode_s", "write_s"] {
            assert!(
                line[key].as_f64().is_some_and(|s| (0.0..600.0).contains(&s)),
                "{key} of {line}"
            );
        }
        assert!(
            line["peak_bytes"].is_u64() || line["peak_bytes"].is_null(),
            "peak_bytes of {line}"
        );
    }
}

#[test]
fn json_names_the_family_and_the_space() {
    let cases = [
        ("sd-tiny", 4, "sd", "diffusion"),
        ("flux1-tiny", 16, "flux1", "diffusion"),
        ("micro-sd3", 16, "sd3", "diffusion"),
        ("micro-flux2-small", 128, "flux2", "diffusion"),
        ("micro-flux2-small", 32, "flux2", "vae"),
    ];
    for (name, channels, family, space) in cases {
        let lab = Lab::new();
        let file = lab.latents("z.safetensors", &Tensor::wave(&[1, channels, 2, 2]));
        let run = lab.decode(&[file, "--vae", &fixture(name), "--json", "-q"]);
        run.wrote(&["z.png"]);
        assert_eq!(run.json_field("family"), json!(family), "{name}\n{run}");
        assert_eq!(
            run.json_field("space"),
            json!(space),
            "{name}, {channels} channels\n{run}"
        );
    }
}

/// f16 turns SDXL's images black; a model that says force_upcast gets f32, and the user is told.
#[test]
fn f16_on_a_model_that_overflows_in_it_runs_in_f32() {
    let (latents, _) = micro("micro-sd");
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &latents);
    let vae = fixture("micro-sd");
    let args = [
        file,
        "--vae",
        &vae,
        "--latent-space",
        "vae",
        "--json",
        "-o",
        "half.safetensors",
        "--dtype",
        "f16",
    ];
    let run = lab.decode(&args);
    run.wrote(&["half.safetensors"]);
    for line in run.json() {
        assert_eq!(line["dtype"], json!("f32"), "{run}");
    }
    assert!(run.stderr.contains("f32"), "the user is not told\n{run}");
    let expected = raw_from_vae_space(&fixture("micro-sd"), &latents, &["--dtype", "f32"]);
    assert_same_bits(
        &lab.raw_image("half.safetensors"),
        &expected,
        "--dtype f16 with force_upcast",
    );
}

#[test]
fn half_precision_on_the_cpu_is_neither_f32_unsaid_nor_far_from_it() {
    // bf16 has three bits of mantissa less than f16: steps eight times as large.
    for (dtype, tolerance, mean_tolerance) in [("f16", 1e-2, 1e-3), ("bf16", 8e-2, 8e-3)] {
        let lab = Lab::new();
        let vae = lab.model("relaxed", MICRO_SD, |_, config| config["force_upcast"] = json!(false));
        let (latents, expected) = micro("micro-sd");
        let file = lab.latents("z.safetensors", &latents);
        let args = [
            file,
            "--vae",
            vae,
            "--latent-space",
            "vae",
            "--json",
            "-o",
            "out.safetensors",
            "--dtype",
            dtype,
        ];
        let run = lab.decode(&args);
        run.wrote(&["out.safetensors"]);
        for line in run.json() {
            assert_eq!(line["dtype"], json!(dtype), "{run}");
        }
        let image = lab.raw_image("out.safetensors");
        assert_close(&image, &expected, tolerance, dtype);
        assert_close_on_average(&image, &expected, mean_tolerance, dtype);
    }
}

#[test]
fn help_lists_every_flag() {
    let run = Lab::new().decode_on_any_device(&["--help"]);
    run.wrote(&[]);
    let flags = "--vae --config --quality --device --dtype --family --tensor --latent-space --height --width -o -q";
    for flag in flags
        .split(' ')
        .chain(["--explain", "--json", "--force", "--resume", "--batch"])
    {
        assert!(run.stdout.contains(flag), "--help does not mention {flag}\n{run}");
    }
}

#[test]
fn help_is_grouped_and_ends_with_examples() {
    let run = Lab::new().decode_on_any_device(&["--help"]);
    run.wrote(&[]);
    let at = |text: &str| {
        let found = run.stdout.find(text);
        found.unwrap_or_else(|| panic!("--help does not mention {text:?}\n{run}"))
    };
    let headings = [
        "Latents:",
        "Model:",
        "Output:",
        "Computation:",
        "Messages:",
        "Examples:",
    ]
    .map(|text| at(&format!("\n{text}\n")));
    assert!(headings.is_sorted(), "{run}");
    for (flag, heading) in [
        ("--tensor", 0),
        ("--family", 1),
        ("--force", 2),
        ("--dtype", 3),
        ("--json", 4),
    ] {
        let place = at(&format!("\n      {flag}"));
        assert!(
            place > headings[heading] && place < headings[heading + 1],
            "{flag} is elsewhere\n{run}"
        );
    }
    // Examples that the program itself would refuse are none.
    let examples = run.stdout[headings[5]..]
        .lines()
        .filter_map(|line| line.trim().split("decode ").nth(1));
    let examples: Vec<&str> = examples.collect();
    assert!(examples.len() >= 4, "{run}");
    for example in examples {
        for flag in example.split(' ').filter(|word| word.starts_with("--")) {
            let options = &run.stdout[..headings[5]];
            assert!(
                options.contains(&format!("      {flag} ")),
                "{flag} of {example:?}\n{run}"
            );
        }
    }
}

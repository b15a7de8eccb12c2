//! The program on bad input: exit 1, one sentence that names what is wrong, no file written or touched, no panic.
//! (`Run::refused` checks all of that.) Usage errors exit with 2.

mod common;

use std::fs;

use common::*;

const MICRO_SD: (&str, &str) = ("micro-sd", WEIGHTS);

/// Runs `decode FILE --vae micro-sd --latent-space vae -o out.png`.
fn decode_micro_sd(lab: &Lab, file: &str) -> Run {
    lab.decode(&[
        file,
        "--vae",
        &fixture("micro-sd"),
        "--latent-space",
        "vae",
        "-o",
        "out.png",
    ])
}

/// Runs micro-sd's own latents, which are fine, through a VAE that may not be.
fn decode_with_vae(lab: &Lab, vae: &str) -> Run {
    let file = lab.latents("z.safetensors", &micro("micro-sd").0);
    lab.decode(&[file, "--vae", vae, "--latent-space", "vae", "-o", "out.safetensors"])
}

/// An edited micro-sd, and what the program says to it.
fn decode_with_edited_vae(edit: impl FnOnce(&mut Tensors, &mut Value)) -> Run {
    let lab = Lab::new();
    let vae = lab.model("edited", MICRO_SD, edit);
    decode_with_vae(&lab, vae)
}

/// The harness itself: what the other tests here break must work unbroken.
#[test]
fn the_unbroken_files_decode() {
    decode_with_edited_vae(|_, _| ()).wrote(&["out.safetensors"]);
    let lab = Lab::new();
    lab.write("one.npy", npy(&Tensor::wave(&[1, 4, 7, 5])));
    decode_micro_sd(&lab, "one.npy").wrote(&["out.png"]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Latent files

#[test]
fn truncated_latents_are_not_padded() {
    let whole = safetensors_bytes([("latents", &Tensor::wave(&[1, 4, 7, 5]))], &[]);
    for length in [0, 4, 8, 40, whole.len() / 2, whole.len() - 1] {
        let lab = Lab::new();
        let file = lab.write("cut.safetensors", &whole[..length]);
        decode_micro_sd(&lab, file).refused(&["cut.safetensors"]);
    }
}

#[test]
fn a_lying_safetensors_header_is_not_believed() {
    let header = r#"{"latents":{"dtype":"F32","shape":[1,4,7,5],"data_offsets":[0,560]}}"#;
    let with = |shape: &str, end: &str| {
        let header = header.replace("[1,4,7,5]", shape).replace("560", end);
        forged_safetensors(header.len() as u64, &header, &[0; 560])
    };
    let files = [
        ("header past the file", forged_safetensors(1 << 20, header, &[0; 560])),
        ("endless header", forged_safetensors(u64::MAX, header, &[0; 560])),
        ("header is not JSON", forged_safetensors(8, "not json", &[])),
        ("header is no object", forged_safetensors(2, "[]", &[])),
        ("data ends past the file", with("[1,4,7,50]", "5600")),
        ("shape and data disagree", with("[1,4,7,6]", "560")),
        ("shape overflows", with("[4294967296,4294967296,4,4]", "560")),
        ("data ends before it starts", with("[1,4,7,5]", "-1")),
    ];
    for (what, bytes) in files {
        let lab = Lab::new();
        let file = lab.write("lying.safetensors", bytes);
        println!("{what}");
        decode_micro_sd(&lab, file).refused(&["lying.safetensors"]);
    }
}

#[test]
fn a_lying_npy_shape_is_not_believed() {
    let values = Tensor::wave(&[1, 4, 7, 5]).bytes;
    for shape in [
        "(1, 4, 7, 6)",
        "(2, 4, 7, 5)",
        "(1, 4, 7, 4)",
        "(1, 4, 4611686018427387904, 16)",
        "(1, 4, -7, 5)",
        "(1, 4,",
    ] {
        let lab = Lab::new();
        let file = lab.write("lying.npy", npy_bytes("<f4", false, shape, &values));
        decode_micro_sd(&lab, file).refused(&["lying.npy"]);
    }
}

#[test]
fn broken_npy_files_are_refused() {
    let whole = npy(&Tensor::wave(&[1, 4, 7, 5]));
    let mut endless = whole.clone();
    endless[8..10].copy_from_slice(&u16::MAX.to_le_bytes());
    let mut unknown_version = whole.clone();
    unknown_version[6] = 9;
    let files = [
        Vec::new(),
        b"PK\x03\x04 a zip".to_vec(),
        whole[..9].to_vec(),
        whole[..60].to_vec(),
        endless,
        unknown_version,
    ];
    for bytes in files {
        let lab = Lab::new();
        let file = lab.write("broken.npy", bytes);
        decode_micro_sd(&lab, file).refused(&["broken.npy"]);
    }
}

#[test]
fn an_npy_file_of_python_objects_is_never_unpickled() {
    let lab = Lab::new();
    let pickle = b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00]\x94(K\x01K\x02e.";
    let file = lab.write("objects.npy", npy_bytes("|O", false, "(1, 4, 7, 5)", pickle));
    decode_micro_sd(&lab, file).refused(&["objects.npy", "object|dtype|descr"]);
}

#[test]
fn integer_latents_are_not_cast() {
    for (dtype, name) in [
        (Dtype::I32, "i32|integer"),
        (Dtype::I64, "i64|integer"),
        (Dtype::U8, "u8|integer"),
        (Dtype::BOOL, "bool"),
    ] {
        let lab = Lab::new();
        let file = lab.latents("whole.safetensors", &Tensor::zeros(dtype, &[1, 4, 7, 5]));
        decode_micro_sd(&lab, file).refused(&["whole.safetensors", name]);
    }
    let lab = Lab::new();
    let file = lab.write("whole.npy", npy_bytes("<i4", false, "(1, 4, 7, 5)", &[0; 560]));
    decode_micro_sd(&lab, file).refused(&["whole.npy", "i4|i32|integer"]);
}

#[test]
fn non_finite_latents_are_counted_and_the_vae_is_not_blamed() {
    let with = |bad: [f32; 3]| Tensor::wave(&[1, 4, 7, 5]).map(|i, x| if i % 50 == 7 { bad[i / 50] } else { x });
    for bad in [[f32::NAN; 3], [f32::INFINITY, f32::NEG_INFINITY, f32::NAN]] {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let lab = Lab::new();
            let file = lab.latents("bad.safetensors", &with(bad).cast(dtype));
            decode_micro_sd(&lab, file).refused(&["latents", "non-finite|not finite", "3"]);
        }
        let lab = Lab::new();
        let file = lab.write("bad.npy", npy(&with(bad)));
        decode_micro_sd(&lab, file).refused(&["latents", "non-finite|not finite", "3"]);
    }
}

/// Finite latents, but their squares are not: a stage of the decoder is to blame.
#[test]
fn latents_that_overflow_name_the_stage_and_give_no_picture() {
    let lab = Lab::new();
    let file = lab.latents("huge.safetensors", &Tensor::wave(&[1, 4, 7, 5]).map(|_, x| x * 1e20));
    decode_micro_sd(&lab, file).refused(&["non-finite", "decoder."]);
}

#[test]
fn empty_latents_do_not_make_an_empty_picture() {
    for shape in [[1, 4, 0, 5], [1, 4, 7, 0], [0, 4, 7, 5], [1, 0, 7, 5]] {
        let lab = Lab::new();
        let file = lab.latents("empty.safetensors", &Tensor::zeros(Dtype::F32, &shape));
        decode_micro_sd(&lab, file).refused(&["0|zero|empty"]);
        let file = lab.write("empty.npy", npy_bytes("<f4", false, &tuple(&shape), &[]));
        decode_micro_sd(&lab, file).refused(&["0|zero|empty"]);
    }
}

#[test]
fn videos_are_not_decoded_frame_by_accident() {
    let lab = Lab::new();
    let file = lab.latents("video.safetensors", &Tensor::wave(&[1, 4, 2, 7, 5]));
    decode_micro_sd(&lab, file).refused(&["[1,4,2,7,5]|2"]);
}

#[test]
fn shapes_that_are_no_latents_are_refused() {
    for shape in [&[28, 5][..], &[140], &[], &[1, 1, 1, 4, 7, 5]] {
        let lab = Lab::new();
        let file = lab.latents("odd.safetensors", &Tensor::wave(shape));
        decode_micro_sd(&lab, file).refused(&["shape|rank|dimension|odd.safetensors"]);
    }
}

#[test]
fn latents_of_another_model_name_both_channel_counts() {
    let cases = [
        ("micro-sd3", vec![1, 4, 7, 5], "4", "16"),
        ("micro-sd", vec![1, 16, 7, 5], "16", "4"),
        ("micro-flux2-small", vec![1, 16, 6, 6], "16", "32|128"),
        ("micro-sd", vec![1, 128, 4, 4], "128", "4"),
    ];
    for (vae, shape, found, expected) in cases {
        for space in ["auto", "vae", "diffusion"] {
            let lab = Lab::new();
            let file = lab.latents("other.safetensors", &Tensor::wave(&shape));
            let run = lab.decode(&[file, "--vae", &fixture(vae), "--latent-space", space, "-o", "out.png"]);
            run.refused(&[found, expected, "channel"]);
        }
    }
}

#[test]
fn a_file_of_several_unknown_tensors_is_not_guessed_at() {
    let lab = Lab::new();
    let z = Tensor::wave(&[1, 4, 7, 5]);
    let file = lab.write(
        "several.safetensors",
        safetensors_bytes([("first", &z), ("second", &z)], &[]),
    );
    decode_micro_sd(&lab, file).refused(&["several.safetensors"]);
    let file = lab.write("none.safetensors", safetensors_bytes([], &[]));
    decode_micro_sd(&lab, file).refused(&["none.safetensors"]);
}

#[test]
fn tokens_that_do_not_fit_the_size_are_not_reshaped() {
    let lab = Lab::new();
    let file = lab.latents("tokens.safetensors", &Tensor::wave(&[1, 15, 128]));
    let vae = fixture("micro-flux2-small");
    for (height, width) in [("20", "20"), ("12", "16"), ("21", "12"), ("0", "12")] {
        let size = ["--height", height, "--width", width, "-o", "out.png"];
        lab.decode(&[&[file, "--vae", &vae], &size[..]].concat())
            .refused(&[height]);
    }
    let run = lab.decode(&[file, "--vae", &vae, "--height", "20", "--width", "20", "-o", "out.png"]);
    run.refused(&["15", "20|25"]);

    let file = lab.latents("tokens.safetensors", &Tensor::wave(&[1, 6, 64]));
    let size = ["--height", "32", "--width", "32", "-o", "out.png"];
    lab.decode(&[&[file, "--vae", &fixture("flux1-tiny")], &size[..]].concat())
        .refused(&["6", "32|4"]);
}

#[test]
fn tokens_of_unknown_size_ask_for_it() {
    for (vae, tokens) in [("micro-flux2-small", [1, 15, 128]), ("flux1-tiny", [1, 6, 64])] {
        let lab = Lab::new();
        let file = lab.latents("tokens.safetensors", &Tensor::wave(&tokens));
        let run = lab.decode(&[file, "--vae", &fixture(vae), "-o", "out.png"]);
        run.refused(&["--height", "--width"]);
    }
}

#[test]
fn a_size_that_contradicts_the_map_is_not_ignored() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let vae = fixture("micro-sd");
    let run = lab.decode(&[file, "--vae", &vae, "--height", "16", "--width", "10", "-o", "out.png"]);
    run.refused(&["height", "16", "14"]);
    let run = lab.decode(&[file, "--vae", &vae, "--height", "14", "--width", "12", "-o", "out.png"]);
    run.refused(&["width", "12", "10"]);
    let run = lab.decode(&[file, "--vae", &vae, "--height", "16", "-o", "out.png"]);
    run.refused(&["height", "16", "14"]);
}

#[test]
fn unknown_latent_files_are_named() {
    let lab = Lab::new();
    for name in ["latents.xyz", "latents.png", "latents"] {
        lab.write(name, "something");
        decode_micro_sd(&lab, name).refused(&[name]);
    }
    decode_micro_sd(&lab, "nowhere.safetensors").refused(&["nowhere.safetensors"]);
    decode_micro_sd(&lab, "nowhere.npy").refused(&["nowhere.npy"]);
    lab.folder("folder.safetensors");
    decode_micro_sd(&lab, "folder.safetensors").refused(&["folder.safetensors"]);
}

#[test]
fn a_tensor_that_is_not_there_lists_what_is() {
    let lab = Lab::new();
    let z = Tensor::wave(&[1, 4, 7, 5]);
    lab.write(
        "several.safetensors",
        safetensors_bytes([("first", &z), ("second", &z)], &[]),
    );
    lab.write("one.npy", npy(&z));
    let decode = |file: &str, tensor: &str| {
        let vae = fixture("micro-sd");
        lab.decode(&[file, "--vae", &vae, "--tensor", tensor, "-o", "out.png"])
    };
    decode("several.safetensors", "third").refused(&["several.safetensors", "`third`", "first, second"]);
    decode(&fixture("sd-tiny/latents/chelsea.npz"), "arr_0").refused(&["chelsea.npz", "`arr_0`", "latents"]);
    for file in ["one.npy", &fixture("sd-tiny/latents/chelsea.pt")] {
        decode(file, "first").refused(&["`first`", "leave out --tensor"]);
    }
    // It is the way out of what is refused without it.
    decode_micro_sd(&lab, "several.safetensors").refused(&["--tensor", "first, second"]);
    decode("several.safetensors", "second").wrote(&["out.png"]);
}

#[test]
fn archives_and_pickles_of_something_else_are_refused() {
    for (bytes, reason) in [
        (&b"PK\x03\x04 and no more"[..], "zip"),
        (b"PK\x05\x06\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "none of"),
        (b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.", "pickle"),
    ] {
        let lab = Lab::new();
        let file = lab.write("other.pt", bytes);
        decode_micro_sd(&lab, file).refused(&["other.pt", reason]);
    }
}

#[test]
fn standard_input_that_is_no_latents_is_refused() {
    let lab = Lab::new();
    lab.write("empty", "");
    lab.write("text", "not latents");
    let whole = safetensors_bytes([("latents", &Tensor::wave(&[1, 4, 7, 5]))], &[]);
    lab.write("cut", &whole[..whole.len() - 1]);
    lab.latents("other", &Tensor::wave(&[1, 16, 7, 5]));
    for (file, reason) in [
        ("empty", "empty"),
        ("text", "none of"),
        ("cut", "bytes"),
        ("other", "16"),
    ] {
        let mut command = lab.command();
        command.args(["-", "--vae", &fixture("micro-sd"), "--device", "cpu"]);
        lab.run(command.stdin(fs::File::open(lab.path(file)).unwrap()))
            .refused(&["standard input", reason]);
    }
}

/// Reading an endless stream to its end would take all memory.
#[cfg(unix)]
#[test]
fn an_endless_standard_input_is_not_read_to_its_end() {
    let lab = Lab::new();
    let mut command = lab.command();
    command.args(["-", "--vae", &fixture("micro-sd"), "--device", "cpu"]);
    lab.run(command.stdin(fs::File::open("/dev/zero").unwrap()))
        .refused(&["standard input", "none of"]);
}

/// Reading from a terminal looks like a hang. The master's side of one counts as one, on Linux.
#[cfg(target_os = "linux")]
#[test]
fn a_terminal_as_standard_input_is_not_waited_for() {
    let lab = Lab::new();
    let terminal = fs::File::options().read(true).write(true).open("/dev/ptmx").unwrap();
    let mut command = lab.command();
    command.args(["-", "--vae", &fixture("micro-sd"), "--device", "cpu"]);
    lab.run(command.stdin(terminal))
        .refused(&["standard input", "terminal"]);
}

/// Opening a pipe waits for a writer, which never comes.
#[cfg(unix)]
#[test]
fn a_pipe_is_not_waited_for() {
    for name in ["pipe.safetensors", "pipe.npy", "pipe.latent"] {
        let lab = Lab::new();
        let made = std::process::Command::new("mkfifo").arg(lab.path(name)).status();
        assert!(made.expect("mkfifo").success());
        decode_micro_sd(&lab, name).refused(&[name, "not a regular file"]);
        if name == "pipe.safetensors" {
            decode_with_vae(&lab, name).refused(&[name, "not a regular file"]);
        }
    }
}

#[cfg(unix)] // Windows has no such names
#[test]
fn a_line_break_in_a_name_does_not_break_the_error() {
    let lab = Lab::new();
    decode_micro_sd(&lab, "two\nlines.npy").refused(&["two\\nlines.npy"]);
    let file = lab.latents("two\nlines.safetensors", &Tensor::wave(&[1, 16, 7, 5]));
    decode_micro_sd(&lab, file).refused(&["two\\nlines.safetensors"]);
    let file = lab.latents("two\nlines.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    lab.write("two\nlines.png", "the only copy");
    lab.decode(&[file, "--vae", &fixture("micro-sd")])
        .refused(&["two\\nlines.png"]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints

#[test]
fn truncated_checkpoints_are_refused() {
    let whole = fs::read(fixture(&format!("micro-sd/{WEIGHTS}"))).unwrap();
    for length in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        let lab = Lab::new();
        lab.copy("micro-sd/config.json", "cut/config.json");
        lab.write(&format!("cut/{WEIGHTS}"), &whole[..length]);
        decode_with_vae(&lab, "cut").refused(&[WEIGHTS]);
    }
}

#[test]
fn a_checkpoint_header_past_the_file_is_refused() {
    for length in [1 << 20, u64::MAX] {
        let lab = Lab::new();
        lab.copy("micro-sd/config.json", "lying/config.json");
        lab.write(&format!("lying/{WEIGHTS}"), forged_safetensors(length, "{}", &[]));
        decode_with_vae(&lab, "lying").refused(&[WEIGHTS]);
    }
}

#[test]
fn a_missing_key_is_named_not_left_at_random() {
    let keys = [
        "post_quant_conv.weight",
        "decoder.conv_in.bias",
        "decoder.mid_block.resnets.0.conv1.weight",
        "decoder.mid_block.attentions.0.to_q.weight",
        "decoder.mid_block.attentions.0.to_out.0.bias",
        "decoder.up_blocks.0.upsamplers.0.conv.weight",
        "decoder.up_blocks.1.resnets.0.conv_shortcut.weight",
        "decoder.up_blocks.1.resnets.1.norm2.weight",
        "decoder.conv_norm_out.bias",
        "decoder.conv_out.weight",
    ];
    for key in keys {
        let run = decode_with_edited_vae(|tensors, _| {
            tensors.remove(key).unwrap_or_else(|| panic!("test bug: no {key}"));
        });
        run.refused(&[key]);
    }
}

#[test]
fn a_missing_ldm_key_is_named() {
    let lab = Lab::new();
    let key = "decoder.mid.block_1.conv1.weight";
    let vae = lab.model("ldm", ("micro-sd", "ldm.safetensors"), |tensors, _| {
        tensors.remove(key).expect("an LDM key");
    });
    let named = format!("{key}|decoder.mid_block.resnets.0.conv1.weight");
    decode_with_vae(&lab, vae).refused(&[&named]);
}

#[test]
fn missing_batch_norm_statistics_are_not_replaced_by_ones() {
    for key in ["bn.running_mean", "bn.running_var"] {
        let lab = Lab::new();
        let vae = lab.model("edited", ("micro-flux2-small", WEIGHTS), |tensors, _| {
            tensors.remove(key).expect("batch-norm statistics");
        });
        let file = lab.latents("map.safetensors", &Tensor::wave(&[1, 128, 3, 2]));
        lab.decode(&[file, "--vae", vae, "-o", "out.png"]).refused(&[key]);
    }
}

#[test]
fn a_wrongly_shaped_tensor_is_named_with_both_shapes() {
    let cases = [
        ("decoder.mid_block.resnets.0.conv1.bias", vec![32], vec![33]),
        (
            "decoder.up_blocks.0.resnets.0.conv2.weight",
            vec![32, 32, 3, 3],
            vec![32, 16, 3, 3],
        ),
        ("decoder.mid_block.resnets.1.norm1.weight", vec![32], vec![16]),
    ];
    for (key, expected, found) in cases {
        let run = decode_with_edited_vae(|tensors, _| {
            assert_eq!(tensors[key].shape, expected, "test bug: the shape of {key}");
            tensors.insert(key.into(), Tensor::zeros(Dtype::F32, &found));
        });
        run.refused(&[key, &format!("{expected:?}"), &format!("{found:?}")]);
    }
}

/// NaN in the weights comes out as NaN in the image: an error, not black pixels, and not the latents' fault.
#[test]
fn a_non_finite_image_is_an_error_not_black_pixels() {
    let lab = Lab::new();
    lab.folder("pictures");
    let vae = lab.model("nan", MICRO_SD, |tensors, _| {
        tensors.insert("decoder.conv_out.bias".into(), Tensor::f32(&[3], [f32::NAN; 3]));
    });
    let file = lab.latents("z.safetensors", &micro("micro-sd").0);
    let run = lab.decode(&[
        file,
        "--vae",
        vae,
        "--latent-space",
        "vae",
        "-o",
        "pictures/",
        "--force",
    ]);
    run.refused(&["non-finite|not finite"]);
    assert!(
        !run.sentence().contains("latents contain"),
        "the latents are blamed for the VAE\n{run}"
    );
}

#[test]
fn configs_of_what_is_not_implemented_are_refused_by_name() {
    let cases = [
        ("_class_name", json!("AutoencoderTiny"), "AutoencoderTiny"),
        ("_class_name", json!("AutoencoderKLWan"), "AutoencoderKLWan"),
        ("act_fn", json!("gelu"), "gelu"),
        (
            "up_block_types",
            json!(["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]),
            "AttnUpDecoderBlock2D",
        ),
    ];
    for (field, value, named) in cases {
        decode_with_edited_vae(|_, config| config[field] = value).refused(&[field, named]);
    }
}

#[test]
fn configs_that_make_no_sense_are_refused() {
    let cases = [
        ("norm_num_groups", json!(0)),
        ("norm_num_groups", json!(7)),
        ("block_out_channels", json!([])),
        ("block_out_channels", json!([0, 0])),
        ("latent_channels", json!(-4)),
        ("layers_per_block", json!("two")),
        ("scaling_factor", json!(0.0)),
    ];
    for (field, value) in cases {
        println!("{field}: {value}");
        let lab = Lab::new();
        let vae = lab.model("edited", MICRO_SD, |_, config| config[field] = value);
        let file = lab.latents("z.safetensors", &micro("micro-sd").0);
        lab.decode(&[file, "--vae", vae, "-o", "out.safetensors"])
            .refused(&[&format!("{field}|config.json")]);
    }
}

#[test]
fn a_broken_config_is_named() {
    let lab = Lab::new();
    lab.model("broken", MICRO_SD, |_, _| ());
    for text in ["", "{", "[1]", "not json"] {
        lab.write("broken/config.json", text);
        decode_with_vae(&lab, "broken").refused(&["config.json"]);
    }
    let file = lab.latents("z.safetensors", &micro("micro-sd").0);
    let run = lab.decode(&[
        file,
        "--vae",
        &fixture("micro-sd"),
        "--config",
        "nowhere.json",
        "-o",
        "out.safetensors",
    ]);
    run.refused(&["nowhere.json"]);
}

#[test]
fn a_broken_config_beside_a_single_file_is_not_ignored() {
    let sound = fs::read_to_string(fixture("micro-sd/config.json")).unwrap();
    let (fields, _) = sound.rsplit_once('}').unwrap();
    for broken in [format!("{fields},}}"), format!("\u{feff}{sound}")] {
        let lab = Lab::new();
        let vae = lab.copy(&format!("micro-sd/{WEIGHTS}"), "beside/vae.safetensors");
        lab.write("beside/config.json", broken);
        decode_with_vae(&lab, vae).refused(&["beside/config.json"]);
    }
}

#[test]
fn a_folder_that_is_no_model_says_what_is_missing() {
    let lab = Lab::new();
    lab.folder("empty");
    decode_with_vae(&lab, "empty").refused(&["empty", ".safetensors|config.json"]);
    decode_with_vae(&lab, "nowhere").refused(&["nowhere"]);
    decode_with_vae(&lab, "nowhere.safetensors").refused(&["nowhere.safetensors"]);
    lab.copy("micro-sd/config.json", "weightless/config.json");
    decode_with_vae(&lab, "weightless").refused(&["weightless", ".safetensors"]);
}

#[test]
fn a_folder_with_two_checkpoints_is_not_guessed_at() {
    let lab = Lab::new();
    lab.copy("micro-sd/config.json", "two/config.json");
    lab.copy("micro-sd/ldm.safetensors", "two/one.safetensors");
    lab.copy(&format!("micro-sd/{WEIGHTS}"), "two/another.safetensors");
    decode_with_vae(&lab, "two").refused(&["two", ".safetensors"]);
}

#[test]
fn a_missing_shard_is_named() {
    let lab = Lab::new();
    lab.model("sharded", MICRO_SD, |_, _| ());
    let whole = read_safetensors(lab.path("sharded").join(WEIGHTS));
    fs::remove_file(lab.path("sharded").join(WEIGHTS)).unwrap();
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let map: serde_json::Map<_, _> = whole
        .keys()
        .enumerate()
        .map(|(i, k)| (k.clone(), json!(shards[i % 2])))
        .collect();
    lab.write(
        &format!("sharded/{WEIGHTS}.index.json"),
        json!({"metadata": {}, "weight_map": map}).to_string(),
    );
    let half: Tensors = whole.into_iter().step_by(2).collect();
    lab.weights(&format!("sharded/{}", shards[0]), &half);
    decode_with_vae(&lab, "sharded").refused(&[shards[1]]);
}

#[test]
fn ambiguous_channels_without_a_config_ask_for_the_family() {
    for (weights, channels, families) in [
        (format!("sd-tiny/{WEIGHTS}"), 4, ["sd", "sdxl"]),
        ("flux1-tiny/ae.safetensors".into(), 16, ["sd3", "flux1"]),
    ] {
        let lab = Lab::new();
        let vae = lab.copy(&weights, "alone/weights.safetensors");
        let file = lab.latents("z.safetensors", &Tensor::wave(&[1, channels, 2, 3]));
        let run = lab.decode(&[file, "--vae", vae, "-o", "out.png"]);
        run.refused(&["--family", families[0], families[1]]);
    }
}

#[test]
fn a_family_that_cannot_be_is_not_ignored() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &micro("micro-sd").0);
    for family in ["sd3", "flux1", "flux2"] {
        let run = lab.decode(&[
            file,
            "--vae",
            &fixture("micro-sd"),
            "--family",
            family,
            "-o",
            "out.safetensors",
        ]);
        run.refused(&[family]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Outputs

#[test]
fn unknown_output_extensions_are_named() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    for out in ["out.gif", "out.xyz"] {
        let run = lab.decode(&[file, "--vae", &fixture("micro-sd"), "-o", out]);
        run.refused(&[out.rsplit_once('.').unwrap().1]);
    }
}

#[test]
fn a_missing_output_folder_is_found_out_before_decoding() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    for out in ["missing/out.png", "missing/out.safetensors", "z.safetensors/out.png"] {
        let run = lab.decode(&[file, "--vae", &fixture("micro-sd"), "-o", out]);
        run.refused(&[out.split_once('/').unwrap().0]);
    }
    assert!(!lab.path("missing").exists(), "a folder was made for nothing");
}

#[test]
fn a_folder_with_a_picture_name_is_not_replaced() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    lab.write("folder.png/keep.txt", "keep");
    for options in [&[][..], &["--force"]] {
        let run = lab.decode(&[&[file, "--vae", &fixture("micro-sd"), "-o", "folder.png"], options].concat());
        run.refused(&["folder.png"]);
    }
}

/// A model whose every picture is an error, so that a run that speaks of the output file has looked before decoding.
fn model_that_cannot_decode(lab: &Lab) -> &'static str {
    lab.model("nan", MICRO_SD, |tensors, _| {
        tensors.insert("decoder.conv_out.bias".into(), Tensor::f32(&[3], [f32::NAN; 3]));
    })
}

#[test]
fn existing_pictures_are_not_overwritten() {
    let lab = Lab::new();
    let one = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let pair = lab.latents("pair.safetensors", &Tensor::wave(&[2, 4, 7, 5]));
    let vae = model_that_cannot_decode(&lab);
    for existing in ["one.png", "pair_1.png", "named.webp", "raw.safetensors", "raw.npy"] {
        lab.write(existing, "the only copy");
    }
    lab.decode(&[one, "--vae", vae])
        .refused(&["one.png", "exist|overwrite|--force"]);
    lab.decode(&[pair, "--vae", vae])
        .refused(&["pair_1.png", "exist|overwrite|--force"]);
    lab.decode(&[one, pair, "--vae", vae])
        .refused(&["one.png|pair_1.png", "exist|overwrite|--force", "--resume"]);
    for existing in ["named.webp", "raw.safetensors", "raw.npy"] {
        lab.decode(&[one, "--vae", vae, "-o", existing])
            .refused(&[existing, "exist|overwrite|--force"]);
    }
}

/// `--force` is for outputs of an earlier run.
#[test]
fn an_input_is_not_overwritten_even_with_force() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let vae = lab.model("vae", MICRO_SD, |_, _| ());
    let config = lab.copy("micro-sd/config.json", "config.npy"); // the name of a possible output
    let weights = format!("{vae}/{WEIGHTS}");
    for out in [file, "./vae/../z.safetensors", &weights, config] {
        lab.decode(&[file, "--vae", vae, "--config", config, "-o", out, "--force"])
            .refused(&[out, "is an input of this run"]);
    }
}

#[test]
fn a_picture_too_wide_for_webp_is_found_out_before_decoding() {
    let lab = Lab::new();
    let file = lab.latents("wide.safetensors", &Tensor::wave(&[1, 4, 1, 8193]));
    let vae = model_that_cannot_decode(&lab);
    lab.decode(&[file, "--vae", vae, "-o", "wide.webp"])
        .refused(&["wide.webp", "WebP", "16386x2", "16384"]);
}

#[cfg(unix)]
#[test]
fn an_unwritable_folder_is_found_out_before_decoding() {
    use std::os::unix::fs::PermissionsExt;

    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let vae = model_that_cannot_decode(&lab);
    lab.folder("locked");
    fs::set_permissions(lab.path("locked"), fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(lab.path("locked/probe"), "").is_ok() {
        return; // root may write everywhere
    }
    for out in ["locked", "locked/", "locked/out.png", "locked/out.npy", "locked/new/"] {
        lab.decode(&[file, "--vae", vae, "-o", out])
            .refused(&["locked", "permission denied"]);
    }
}

#[test]
fn a_failed_decode_leaves_the_old_picture_even_with_force() {
    let lab = Lab::new();
    let one = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let vae = model_that_cannot_decode(&lab);
    lab.write("one.png", "the only copy");
    lab.decode(&[one, "--vae", vae, "--force"])
        .refused(&["non-finite|not finite"]);
}

/// A name that names nothing is a mistake in the command, unlike a file that turns out to be bad (tests/many.rs).
#[test]
fn an_argument_without_a_file_stops_all_before_any_is_decoded() {
    let lab = Lab::new();
    let file = lab.latents("a.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    lab.write("other/notes.txt", "no latents");
    for (argument, reason) in [
        ("nowhere.npy", "cannot open"),
        ("other", "no files that end with .safetensors"),
        ("*.npz", "matches no file"),
        ("[a-.npz", "pattern"),
    ] {
        for arguments in [[file, argument], [argument, file]] {
            let run = lab.decode(&[&arguments[..], &["--vae", &fixture("micro-sd")]].concat());
            run.refused(&[argument, reason]);
        }
    }
}

#[test]
fn two_inputs_never_write_one_file() {
    let lab = Lab::new();
    let one = Tensor::wave(&[1, 4, 7, 5]);
    let vae = model_that_cannot_decode(&lab);
    let a = lab.latents("a/same.safetensors", &one);
    let b = lab.latents("b/same.safetensors", &one);
    let array = lab.write("a/same.npy", npy(&one));
    lab.folder("out");
    for options in [&[][..], &["-o", "out"], &["-o", "out/"], &["--force"]] {
        for inputs in [[a, b], [a, array], [a, a]] {
            lab.decode(&[&inputs[..], &["--vae", vae], options].concat())
                .refused(&["same.png"]);
        }
    }
    // A batch numbers its pictures: pair_0.png may be another input's.
    let pair = lab.latents("pair.safetensors", &Tensor::wave(&[2, 4, 7, 5]));
    let zero = lab.latents("pair_0.safetensors", &one);
    lab.decode(&[pair, zero, "--vae", vae]).refused(&["pair_0.png"]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Devices and quality

/// No machine has a hundredth device, and most builds have no such backend at all.
#[test]
fn a_device_that_is_not_there_is_an_error() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    for (device, feature) in [("cuda:99", "--features cuda"), ("wgpu:99", "--features wgpu")] {
        let run = lab.decode_on_any_device(&[file, "--vae", &fixture("micro-sd"), "-o", "out.png", "--device", device]);
        run.refused(&[]);
        if run.sentence().contains("built without") {
            run.refused(&[feature]);
        }
    }
}

/// On a machine with CUDA this decodes; without the feature or the device it is an error that says what to do.
#[test]
fn cuda_works_or_says_why_not() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let run = lab.decode_on_any_device(&[file, "--vae", &fixture("micro-sd"), "-o", "out.png", "--device", "cuda"]);
    if run.code == Some(0) {
        run.wrote(&["out.png"]);
    } else {
        run.refused(&["cuda"]);
        if run.sentence().contains("built without") {
            run.refused(&["--features cuda"]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Usage

#[test]
fn usage_errors_exit_with_two() {
    let lab = Lab::new();
    let file = lab.latents("z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let vae = fixture("micro-sd");
    let wrong_flags = [
        &["--qualty", "high"][..],
        &["--quality", "best"],
        &["--quality"],
        &["--dtype", "f8"],
        &["--family", "sd4"],
        &["--latent-space", "pixels"],
        &["--height", "tall"],
        &["--height", "-8"],
        &["--width", "1.5"],
        &["--device", "abacus"],
        &["--device", "cuda:x"],
        &["--device", "cpu:"],
        &["--batch", "0"],
        &["--batch", "-1"],
        &["--batch", "many"],
        &["--resume", "--force"],
    ];
    for flags in wrong_flags {
        println!("{flags:?}");
        lab.decode_on_any_device(&[&[file, "--vae", &vae], flags].concat())
            .usage_error();
    }
    lab.decode(&[file]).usage_error();
    lab.decode(&["-", "-", "--vae", &vae]).usage_error();
    lab.decode(&["--vae", &vae]).usage_error();
    lab.decode_on_any_device(&[]).usage_error();
}

#[test]
fn several_inputs_into_one_file_are_a_usage_error() {
    let lab = Lab::new();
    let one = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let two = lab.latents("two.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    for out in ["out.png", "out.safetensors", "out.npy"] {
        lab.decode(&[one, two, "--vae", &fixture("micro-sd"), "-o", out])
            .usage_error();
    }
}

//! Checkpoints as users have them: every key style and layout of the fixtures, and broken files.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;
use vae_io::{Checkpoint, DType, Error, Family, VaeConfig};

const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";
const INDEX: &str = "diffusion_pytorch_model.safetensors.index.json";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(fixture(name)).unwrap()
}

fn config(name: &str) -> VaeConfig {
    VaeConfig::read(fixture(name).join("config.json")).unwrap()
}

/// A tensor to write: its name, type, shape and bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn zeros(name: &str, dtype: Dtype, shape: &[usize]) -> Tensor {
    let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    (name.to_owned(), dtype, shape.to_vec(), vec![0; bytes])
}

fn views(tensors: &[Tensor]) -> impl Iterator<Item = (&str, TensorView<'_>)> {
    tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()))
}

fn write(path: &Path, tensors: &[Tensor]) {
    fs::write(path, safetensors::serialize(views(tensors), None).unwrap()).unwrap();
}

/// Opens a checkpoint of these tensors.
fn opened(tensors: &[Tensor]) -> vae_io::Result<Checkpoint> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("x.safetensors");
    write(&path, tensors);
    Checkpoint::open(path)
}

fn message<T: std::fmt::Debug>(result: vae_io::Result<T>) -> String {
    result.unwrap_err().to_string()
}

/// What a checkpoint holds, whatever it calls it.
fn contents(checkpoint: &Checkpoint) -> Vec<(String, DType, Vec<usize>, Vec<u8>)> {
    let tensor = |key: &str| {
        let tensor = checkpoint.get(key).unwrap();
        (
            key.to_owned(),
            tensor.dtype,
            tensor.shape.to_vec(),
            tensor.bytes.to_vec(),
        )
    };
    checkpoint.keys().map(tensor).collect()
}

/// The parameters of a decoder, written down independently of the code that reads them.
fn parameters(config: &VaeConfig) -> Vec<(String, Vec<usize>)> {
    let decoder = config.decoder();
    let (latents, widths) = (decoder.latent_channels, &decoder.block_out_channels);
    let middle = *widths.last().unwrap();
    let mut all = Vec::new();
    let mut layer = |name: &str, shape: &[usize]| {
        all.push((format!("{name}.weight"), shape.to_vec()));
        all.push((format!("{name}.bias"), vec![shape[0]]));
    };
    let resnet = |layer: &mut dyn FnMut(&str, &[usize]), name: &str, input: usize, output: usize| {
        layer(&format!("{name}.norm1"), &[input]);
        layer(&format!("{name}.conv1"), &[output, input, 3, 3]);
        layer(&format!("{name}.norm2"), &[output]);
        layer(&format!("{name}.conv2"), &[output, output, 3, 3]);
        if input != output {
            layer(&format!("{name}.conv_shortcut"), &[output, input, 1, 1]);
        }
    };
    if config.use_post_quant_conv() {
        layer("post_quant_conv", &[latents, latents, 1, 1]);
    }
    layer("decoder.conv_in", &[middle, latents, 3, 3]);
    for i in 0..2 {
        resnet(&mut layer, &format!("decoder.mid_block.resnets.{i}"), middle, middle);
    }
    if decoder.mid_block_add_attention {
        layer("decoder.mid_block.attentions.0.group_norm", &[middle]);
        for name in ["to_q", "to_k", "to_v", "to_out.0"] {
            layer(&format!("decoder.mid_block.attentions.0.{name}"), &[middle, middle]);
        }
    }
    let mut input = middle;
    for (i, &output) in widths.iter().rev().enumerate() {
        for j in 0..=decoder.layers_per_block {
            resnet(&mut layer, &format!("decoder.up_blocks.{i}.resnets.{j}"), input, output);
            input = output;
        }
        if i + 1 < widths.len() {
            layer(
                &format!("decoder.up_blocks.{i}.upsamplers.0.conv"),
                &[output, output, 3, 3],
            );
        }
    }
    layer("decoder.conv_norm_out", &[widths[0]]);
    layer("decoder.conv_out", &[3, widths[0], 3, 3]);
    if matches!(config, VaeConfig::Flux2(_)) {
        all.push(("bn.running_mean".to_owned(), vec![4 * latents]));
        all.push(("bn.running_var".to_owned(), vec![4 * latents]));
    }
    all.sort();
    all
}

#[test]
fn every_fixture_holds_exactly_the_parameters_of_its_config() {
    for (folder, files) in [
        ("flux1-tiny", ["ae.safetensors"].as_slice()),
        ("flux2-tiny", &[WEIGHTS]),
        ("sd-tiny", &[WEIGHTS]),
        (
            "micro-sd",
            &[
                WEIGHTS,
                "ldm.safetensors",
                "old_attention_names.safetensors",
                "full_checkpoint_ldm.safetensors",
            ],
        ),
        (
            "micro-sd3",
            &[WEIGHTS, "ldm.safetensors", "full_checkpoint_ldm.safetensors"],
        ),
        ("micro-flux2-small", &[WEIGHTS, "bfl.safetensors"]),
        ("micro-no-attention", &[WEIGHTS]),
    ] {
        let expected = parameters(&config(folder));
        for file in files {
            let checkpoint = open(&format!("{folder}/{file}"));
            let shapes = checkpoint
                .keys()
                .map(|key| (key.to_owned(), checkpoint.get(key).unwrap().shape.to_vec()));
            assert_eq!(shapes.collect::<Vec<_>>(), expected, "{folder}/{file}");
            assert_eq!(checkpoint.config_path(), Some(fixture(folder).join("config.json")));
        }
    }
}

#[test]
fn the_other_key_styles_name_the_same_tensors() {
    for (folder, others) in [
        (
            "micro-sd",
            ["ldm", "old_attention_names", "full_checkpoint_ldm"].as_slice(),
        ),
        ("micro-sd3", &["ldm", "full_checkpoint_ldm"]),
        ("micro-flux2-small", &["bfl"]),
    ] {
        let expected = contents(&open(folder));
        for other in others {
            // Blocks taken in the wrong order would still have the right names, and here also the right shapes.
            assert!(
                contents(&open(&format!("{folder}/{other}.safetensors"))) == expected,
                "{folder}/{other}"
            );
        }
    }
}

#[test]
fn tensors_are_read_with_their_type_and_name_in_the_file() {
    let checkpoint = open("micro-sd/full_checkpoint_ldm.safetensors");
    let tensor = checkpoint
        .get("decoder.up_blocks.1.resnets.0.conv_shortcut.weight")
        .unwrap();
    assert_eq!(
        tensor.source_key,
        "first_stage_model.decoder.up.0.block.0.nin_shortcut.weight"
    );
    assert_eq!(tensor.to_f32().len(), 16 * 32);
    assert_eq!(checkpoint.ignored(), 1);
    assert!(checkpoint.get("model.diffusion_model.dummy").is_none());
    assert!(checkpoint.get("first_stage_model.decoder.conv_in.weight").is_none());

    let dtype = |name: &str| open(name).get("decoder.conv_in.weight").unwrap().dtype;
    assert_eq!(dtype("flux1-tiny/ae.safetensors"), DType::BF16);
    assert_eq!(dtype("sd-tiny"), DType::F16);
    assert_eq!(dtype("micro-sd"), DType::F32);
    // The batch norm's counter is an integer, and no parameter.
    assert_eq!(open("flux2-tiny").ignored(), 1);
}

#[test]
fn the_layout_is_inferred_from_the_tensors() {
    let infer = |name: &str, family| VaeConfig::infer(&open(name), family);
    assert_eq!(
        infer("flux1-tiny/ae.safetensors", Some(Family::Flux1)).unwrap(),
        config("flux1-tiny")
    );
    assert_eq!(infer("sd-tiny", Some(Family::Sd)).unwrap(), config("sd-tiny"));
    assert_eq!(infer("flux2-tiny", Some(Family::Flux2)).unwrap(), config("flux2-tiny"));
    assert_eq!(infer("flux2-tiny", None).unwrap(), config("flux2-tiny"));

    let candidates = |name: &str| match infer(name, None) {
        Err(Error::UnknownFamily { candidates, .. }) => candidates,
        other => panic!("{other:?}"),
    };
    assert_eq!(candidates("sd-tiny"), "sd|sdxl");
    assert_eq!(candidates("flux1-tiny/ae.safetensors"), "sd3|flux1");
    assert_eq!(
        message(infer("sd-tiny", Some(Family::Flux1))),
        "unsupported config: family is flux1 with 16 latent channels, supported: sd|sdxl: the checkpoint has 4"
    );
    assert_eq!(
        message(infer("flux2-tiny", Some(Family::Sd3))),
        "unsupported config: family is sd3 with 16 latent channels, \
         supported: flux2: the checkpoint has 32 beside batch-norm statistics (bn.*)"
    );
    // Widths 16 and 32 cannot have the usual 32 groups; guessing would give a wrong picture.
    let error = message(infer("micro-sd", Some(Family::Sd)));
    assert!(
        error.contains("[16, 32] channels") && error.contains("--config"),
        "{error}"
    );
}

#[test]
fn full_size_layouts_are_inferred_without_constants() {
    for preset in [
        VaeConfig::preset(Family::Sdxl),
        VaeConfig::preset(Family::Sd3),
        VaeConfig::preset(Family::Flux2),
        VaeConfig::Flux2(vae_io::Flux2Config::small()),
    ] {
        let mut expected = preset.clone();
        if let VaeConfig::AutoencoderKl(config) = &mut expected {
            config.decoder.mid_block_add_attention = false;
            config.decoder.layers_per_block = 1;
            config.use_post_quant_conv = !config.use_post_quant_conv;
        }
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("x.safetensors");
        sparse(&path, &parameters(&expected));
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(VaeConfig::infer(&checkpoint, preset.family()).unwrap(), expected);
    }
}

/// An f16 checkpoint of zeros that takes no space on disk.
fn sparse(path: &Path, tensors: &[(String, Vec<usize>)]) {
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(
            name.clone(),
            json!({"dtype": "F16", "shape": shape, "data_offsets": [start, end]}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    fs::write(path, &bytes).unwrap();
    fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len((bytes.len() + end) as u64)
        .unwrap();
}

#[test]
fn a_checkpoint_without_the_ends_of_a_decoder_cannot_be_inferred() {
    let infer = |tensors: &[Tensor]| message(VaeConfig::infer(&opened(tensors).unwrap(), Some(Family::Sd)));
    let conv_in = zeros("decoder.conv_in.weight", Dtype::F32, &[32, 4, 3, 3]);
    let conv_out = zeros("decoder.conv_out.weight", Dtype::F32, &[3, 32, 3, 3]);
    assert!(infer(std::slice::from_ref(&conv_out)).contains("`decoder.conv_in.weight`"));
    assert!(infer(std::slice::from_ref(&conv_in)).contains("`decoder.conv_out.weight`"));
    assert!(infer(&[conv_in.clone(), conv_out.clone()]).contains("block_out_channels"));
    let video = zeros("decoder.conv_in.weight", Dtype::F32, &[32, 4, 3, 3, 3]);
    assert!(infer(&[video, conv_out]).contains("[32, 4, 3, 3, 3]"));
    let odd = zeros("decoder.conv_in.weight", Dtype::F32, &[32, 8, 3, 3]);
    let out = zeros("decoder.conv_out.weight", Dtype::F32, &[3, 32, 3, 3]);
    assert!(infer(&[odd, out]).contains("latent_channels is 8"));
}

#[test]
fn shards_are_one_checkpoint() {
    let whole = open("micro-sd");
    let folder = TempDir::new().unwrap();
    let mut shards = [Vec::new(), Vec::new()];
    let mut weight_map = serde_json::Map::new();
    for (i, (key, dtype, shape, bytes)) in contents(&whole).into_iter().enumerate() {
        assert_eq!(dtype, DType::F32);
        weight_map.insert(key.clone(), json!(format!("shard-{}.safetensors", i % 2)));
        shards[i % 2].push((key, Dtype::F32, shape, bytes));
    }
    for (i, shard) in shards.iter().enumerate() {
        write(&folder.path().join(format!("shard-{i}.safetensors")), shard);
    }
    fs::write(
        folder.path().join(INDEX),
        json!({"metadata": {}, "weight_map": weight_map}).to_string(),
    )
    .unwrap();

    let sharded = Checkpoint::open(folder.path()).unwrap();
    assert!(contents(&sharded) == contents(&whole));
    assert_eq!(
        sharded.files(),
        [0, 1].map(|i| folder.path().join(format!("shard-{i}.safetensors")))
    );
    assert_eq!(sharded.config_path(), None);
}

#[test]
fn an_index_that_is_broken_or_leaves_its_folder_is_refused() {
    let outer = TempDir::new().unwrap();
    let folder = outer.path().join("model");
    fs::create_dir(&folder).unwrap();
    // Both exist, so that only the check of the name can refuse them.
    let secret = outer.path().join("secret.safetensors");
    write(&secret, &[zeros("decoder.conv_in.weight", Dtype::F32, &[1])]);
    write(
        &folder.join("a.safetensors"),
        &[zeros("decoder.conv_in.weight", Dtype::F32, &[1])],
    );
    let attempt = |index: &str| {
        fs::write(folder.join(INDEX), index).unwrap();
        Checkpoint::open(&folder)
    };
    let map = |file: Value| json!({"weight_map": {"decoder.conv_in.weight": file}}).to_string();

    attempt(&map(json!("a.safetensors"))).unwrap();
    for file in [
        json!("../secret.safetensors"),
        json!(secret),
        json!("a/../../secret.safetensors"),
        json!(""),
        json!(7),
    ] {
        let error = message(attempt(&map(file)));
        assert!(error.contains("not a file name in its folder"), "{error}");
    }
    for index in ["", "[]", "{}", "{\"weight_map\": []}", "{\"weight_map\": {}}", "\u{0}"] {
        assert!(
            matches!(
                attempt(index),
                Err(Error::InvalidFile {
                    kind: "checkpoint index",
                    ..
                })
            ),
            "{index}"
        );
    }
    let error = message(attempt(&map(json!("missing.safetensors"))));
    assert!(error.contains("missing.safetensors"), "{error}");
}

#[test]
fn a_folder_means_one_checkpoint_or_none() {
    let folder = TempDir::new().unwrap();
    let file = |name: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        write(&path, &[zeros("decoder.conv_in.weight", Dtype::F32, &[1])]);
        path
    };
    let found =
        || Checkpoint::open(folder.path()).map(|checkpoint| (checkpoint.files().to_vec(), checkpoint.config_path()));

    assert!(message(found()).contains("holds a .safetensors file"));
    let only = file("model.safetensors");
    fs::write(folder.path().join("._model.safetensors"), "").unwrap();
    assert_eq!(found().unwrap(), (vec![only], None));
    // Not a guess between variants, nor shards without their index.
    file("model.fp16.safetensors");
    let error = message(found());
    assert!(
        error.contains("name one of them: model.fp16.safetensors, model.safetensors"),
        "{error}"
    );
    // A pipeline, with whole models in single files beside it.
    let variant = file("vae/diffusion_pytorch_model.fp16.safetensors");
    assert_eq!(found().unwrap(), (vec![variant], None));
    let vae = file(&format!("vae/{WEIGHTS}"));
    fs::write(folder.path().join("vae/config.json"), "").unwrap();
    assert_eq!(
        found().unwrap(),
        (vec![vae], Some(folder.path().join("vae/config.json")))
    );
    let own = file(WEIGHTS);
    assert_eq!(found().unwrap(), (vec![own], None));
}

#[test]
fn a_config_beside_a_single_file_counts_only_if_it_is_an_autoencoders() {
    let folder = TempDir::new().unwrap();
    let weights = folder.path().join("x.safetensors");
    write(&weights, &[zeros("decoder.conv_in.weight", Dtype::F32, &[1])]);
    let config = folder.path().join("config.json");
    for (text, counts) in [
        (r#"{"_class_name": "AutoencoderKL"}"#, true),
        // Not decodable, but to be refused rather than overlooked.
        (r#"{"_class_name": "AutoencoderKLWan"}"#, true),
        (r#"{"_class_name": "UNet2DConditionModel"}"#, false),
        (r#"{"model_type": "t5"}"#, false),
        // Broken, so perhaps meant for these weights: reading it says what is wrong.
        ("not json", true),
        (r#"{"latent_channels": 4}"#, true),
    ] {
        fs::write(&config, text).unwrap();
        assert_eq!(
            Checkpoint::open(&weights).unwrap().config_path(),
            counts.then(|| config.clone()),
            "{text}"
        );
    }
}

#[test]
fn two_copies_of_a_tensor_are_refused_with_both_names() {
    for (a, b) in [
        ("decoder.conv_in.weight", "vae.decoder.conv_in.weight"),
        ("first_stage_model.post_quant_conv.bias", "vae.post_quant_conv.bias"),
        ("decoder.post_quant_conv.bias", "post_quant_conv.bias"),
        ("decoder.norm_out.weight", "decoder.conv_norm_out.weight"),
        (
            "decoder.mid.attn_1.q.weight",
            "decoder.mid_block.attentions.0.query.weight",
        ),
        (
            "decoder.up.0.upsample.conv.bias",
            "decoder.up_blocks.0.upsamplers.0.conv.bias",
        ),
    ] {
        let error = message(opened(&[zeros(a, Dtype::F32, &[1]), zeros(b, Dtype::F32, &[1])]));
        assert!(
            error.contains(&format!("`{a}`")) && error.contains(&format!("`{b}`")),
            "{error}"
        );
    }
}

#[test]
fn decoder_tensors_that_are_not_floats_are_named_and_others_ignored() {
    let good = zeros("vae.decoder.conv_in.weight", Dtype::F64, &[1]);
    for dtype in [Dtype::F8_E4M3, Dtype::I64, Dtype::U8, Dtype::BOOL] {
        let error = message(opened(&[good.clone(), zeros("vae.decoder.conv_out.bias", dtype, &[3])]));
        assert!(
            error.contains("`vae.decoder.conv_out.bias`") && error.contains(&dtype.to_string()),
            "{error}"
        );
        let elsewhere = zeros("text_model.decoder.conv_out.bias", dtype, &[3]);
        assert_eq!(opened(&[good.clone(), elsewhere]).unwrap().ignored(), 1);
    }
}

#[test]
fn only_attention_matrices_lose_their_kernel_dimensions() {
    let checkpoint = opened(&[
        zeros("decoder.mid.attn_1.q.weight", Dtype::F16, &[8, 8, 1, 1]),
        zeros("decoder.mid.attn_1.k.weight", Dtype::F16, &[8, 8, 3, 3]),
        zeros("decoder.post_quant_conv.weight", Dtype::F16, &[4, 4, 1, 1]),
    ])
    .unwrap();
    let shape = |key: &str| checkpoint.get(key).unwrap().shape;
    assert_eq!(shape("decoder.mid_block.attentions.0.to_q.weight"), [8, 8]);
    assert_eq!(shape("decoder.mid_block.attentions.0.to_k.weight"), [8, 8, 3, 3]);
    assert_eq!(shape("post_quant_conv.weight"), [4, 4, 1, 1]);
}

#[test]
fn paths_that_are_no_checkpoint_are_refused() {
    assert!(matches!(
        Checkpoint::open("does-not-exist.safetensors"),
        Err(Error::Io { .. })
    ));
    assert!(matches!(
        Checkpoint::open(fixture("sd-tiny/coffee.png")),
        Err(Error::UnknownExtension { .. })
    ));
    let error = message(opened(&[zeros("text_model.embed.weight", Dtype::F32, &[1])]));
    assert!(error.contains("none of its 1 tensors belongs to a decoder"), "{error}");
    #[cfg(unix)]
    {
        let folder = TempDir::new().unwrap();
        let link = folder.path().join("x.safetensors");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert!(message(Checkpoint::open(link)).contains("not a regular file"));
    }
}

/// A small valid file, to be broken.
fn small() -> Vec<u8> {
    let tensors = [
        zeros("decoder.conv_in.weight", Dtype::F16, &[32, 4, 1, 1]),
        zeros("decoder.conv_out.weight", Dtype::F32, &[3, 32, 1, 1]),
        zeros("decoder.up.0.block.0.conv1.weight", Dtype::BF16, &[32, 1, 1, 1]),
        zeros(
            "first_stage_model.decoder.mid.attn_1.q.weight",
            Dtype::F64,
            &[2, 2, 1, 1],
        ),
        zeros("bn.num_batches_tracked", Dtype::I64, &[]),
    ];
    safetensors::serialize(views(&tensors), None).unwrap()
}

/// Opens these bytes and touches everything in them.
fn touch(folder: &TempDir, bytes: &[u8]) -> vae_io::Result<()> {
    // A new file each time: the last one may still be mapped.
    let path = folder.path().join("x.safetensors");
    let _ = fs::remove_file(&path);
    fs::write(&path, bytes).unwrap();
    let checkpoint = Checkpoint::open(&path)?;
    for key in checkpoint.keys() {
        let tensor = checkpoint.get(key).unwrap();
        assert_eq!(tensor.to_f32().len(), tensor.shape.iter().product::<usize>());
    }
    for family in [None, Some(Family::Sd)] {
        let _ = VaeConfig::infer(&checkpoint, family);
    }
    Ok(())
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let (folder, whole) = (TempDir::new().unwrap(), small());
    touch(&folder, &whole).unwrap();
    for length in 0..whole.len() {
        let result = touch(&folder, &whole[..length]);
        assert!(
            matches!(
                result,
                Err(Error::InvalidFile {
                    kind: "safetensors file",
                    ..
                })
            ),
            "{length}: {result:?}"
        );
    }
    let longer = [whole.as_slice(), &[0]].concat();
    assert!(matches!(touch(&folder, &longer), Err(Error::InvalidFile { .. })));
}

/// Up to eight places in a file, each with what to put there.
fn changes(byte: impl Strategy<Value = u8>) -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    prop::collection::vec((any::<prop::sample::Index>(), byte), 1..=8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn changed_bytes_never_panic(changes in changes(any::<u8>())) {
        let mut bytes = small();
        for (index, byte) in changes {
            *index.get_mut(&mut bytes) = byte;
        }
        let _ = touch(&TempDir::new().unwrap(), &bytes);
    }

    /// Lengths, shapes, offsets and block numbers: changes that keep the header readable.
    #[test]
    fn changed_digits_never_panic(changes in changes(b'0'..=b'9')) {
        let mut bytes = small();
        let digits: Vec<_> = (8..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
        for (index, digit) in changes {
            bytes[*index.get(&digits)] = digit;
        }
        let _ = touch(&TempDir::new().unwrap(), &bytes);
    }
}

//! Files that NumPy and PyTorch wrote themselves (tests/files/make.py): latents of [1, 4, 2, 3] that count from 0.

use std::path::{Path, PathBuf};

use vae_io::{DType, Error, LatentFile, Result};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name)
}

fn read(name: &str, tensor: Option<&str>) -> Result<LatentFile> {
    LatentFile::read_tensor(file(name), tensor)
}

/// Counts from `first` in `shape`, in the order that they are read in.
#[track_caller]
fn check(name: &str, tensor: Option<&str>, dtype: DType, first: f32) {
    let latents = read(name, tensor).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(latents.shape, [1, 4, 2, 3], "{name}");
    assert_eq!(latents.dtype, dtype, "{name}");
    let expected: Vec<f32> = (0..24).map(|i| first + i as f32).collect();
    assert_eq!(latents.values, expected, "{name}");
}

#[track_caller]
fn refused(name: &str, tensor: Option<&str>, expected: &str) {
    let message = read(name, tensor).expect_err(name).to_string();
    assert!(message.contains(expected), "{message}");
}

#[test]
fn tensors_of_every_type_and_protocol_are_read() {
    for (name, dtype) in [
        ("float16.pt", DType::F16),
        ("bfloat16.pt", DType::BF16),
        ("float32.pt", DType::F32),
        ("float64.pt", DType::F64),
        ("protocol3.pt", DType::F32),
        ("protocol4.pt", DType::F32),
        ("protocol5.pt", DType::F32),
        ("parameter.pt", DType::F32),
        ("unchecked.pt", DType::F32),
    ] {
        check(name, None, dtype, 0.0);
    }
}

#[test]
fn views_are_read_in_the_order_of_their_strides() {
    check("permuted.pt", None, DType::F32, 0.0);
    check("sliced.pt", None, DType::F32, 0.0);
    let latents = read("expanded.pt", None).unwrap();
    assert_eq!(latents.shape, [2, 4, 2, 3]);
    assert_eq!(latents.values, (0..48).map(|i| (i % 24) as f32).collect::<Vec<_>>());
}

#[test]
fn a_view_that_repeats_a_value_thousands_of_times_is_refused() {
    refused("repeated.pt", None, "repeats 1 values 16384 times; save it as it is");
}

#[test]
fn a_view_whose_values_are_negated_when_used_is_refused() {
    refused("negated.pt", None, "metadata");
}

#[test]
fn tensors_of_a_dict_are_read_by_name() {
    check("dict.pt", None, DType::F32, 0.0);
    check("dict.pt", Some("latents"), DType::F32, 0.0);
    check("dict.pt", Some("noise"), DType::F32, 100.0);
    check("state_dict.pt", None, DType::F32, 0.0);
    for name in ["prompt", "steps", "nothing"] {
        refused(
            "dict.pt",
            Some(name),
            &format!("no tensor `{name}`; it has: latents, noise"),
        );
    }
    refused("float32.pt", Some("latents"), "no `latents`; leave out --tensor");
}

#[test]
fn what_torch_saves_besides_tensors_is_named() {
    refused("list.pt", None, "holds a list; save a tensor, or a dict with tensors");
    refused("module.pt", None, "holds an object of torch.nn.modules.conv.Conv2d");
    refused("text.pt", None, "holds no tensor");
    refused("int64.pt", None, "torch.LongStorage; latents must be floating point");
    refused("legacy.pt", None, "a bare pickle, as PyTorch wrote before 1.6");
    assert!(matches!(read("empty.pt", None), Err(Error::InvalidLatents { .. })));
}

#[test]
fn arrays_of_an_npz_are_read_by_name() {
    check("stored.npz", None, DType::F32, 0.0);
    check("stored.npz", Some("arr_0"), DType::F32, 0.0);
    check("deflated.npz", None, DType::F16, 0.0);
    check("deflated.npz", Some("noise"), DType::F32, 100.0);
    check("fortran.npz", None, DType::F64, 0.0);
    check("several.npz", Some("second"), DType::F32, 100.0);
    refused("several.npz", None, "pass --tensor with one of: first, second, steps");
    refused(
        "several.npz",
        Some("third"),
        "no tensor `third`; it has: first, second, steps",
    );
    refused("several.npz", Some("steps"), "`steps`: its elements are '<i8'");
    refused("objects.npz", None, "object arrays are pickles");
}

#[test]
fn a_zip_bomb_is_refused() {
    refused("bomb.npz", None, "would unpack to 16777344 bytes");
}

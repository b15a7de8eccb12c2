//! Headers of safetensors checkpoints; and, of inputs that start as JSON does, the index of a sharded one.

#![no_main]

use std::fs;
use std::path::Path;

use fuzz::bounded;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use vae_io::{Checkpoint, Family, Result, VaeConfig};

const SHARD: &str = "shard.safetensors";

thread_local! {
    static FOLDER: TempDir = {
        // Memory where there is such a folder: a file is written for every input.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.unwrap();
        let header = br#"{"decoder.conv_in.bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let shard = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
        fs::write(folder.path().join(SHARD), shard).unwrap();
        folder
    };
}

fn read(path: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    for key in checkpoint.keys() {
        let tensor = checkpoint.get(key).unwrap();
        assert_eq!(
            tensor.bytes.len(),
            tensor.shape.iter().product::<usize>() * tensor.dtype.size()
        );
    }
    for family in [None, Some(Family::Sd), Some(Family::Flux2)] {
        let _ = VaeConfig::infer(&checkpoint, family);
    }
    // An index names files of its folder only.
    for file in checkpoint.files() {
        assert!(file.starts_with(path.parent().unwrap()) && !file.to_string_lossy().contains(".."));
    }
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    FOLDER.with(|folder| {
        let index = bytes.first() == Some(&b'{');
        let name = if index {
            "diffusion_pytorch_model.safetensors.index.json"
        } else {
            "one.safetensors"
        };
        let file = folder.path().join(name);
        fs::write(&file, bytes).unwrap();
        let path = if index { folder.path() } else { file.as_path() };
        let _ = bounded(bytes.len(), 64, 64 << 10, || read(path));
        fs::remove_file(&file).unwrap();
    });
});

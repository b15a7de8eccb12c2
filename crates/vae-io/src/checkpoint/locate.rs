//! Which files a path given by a user means.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::config::{is_autoencoder_kl, read_json};
use crate::{Error, Result};

const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";
const INDEX: &str = "diffusion_pytorch_model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// About a hundred thousand tensors.
const MAX_INDEX_BYTES: u64 = 16 << 20;

pub(super) struct Located {
    pub files: Vec<PathBuf>,
    pub config: Option<PathBuf>,
}

pub(super) fn locate(path: &Path) -> Result<Located> {
    let metadata = fs::metadata(path).map_err(Error::io("open", path))?;
    if metadata.is_dir() {
        return in_folder(path);
    }
    // ComfyUI and others call FLUX's autoencoder `ae.sft`.
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    if extension != "safetensors" && extension != "sft" {
        return Err(Error::UnknownExtension {
            path: path.to_owned(),
            supported: ".safetensors, .sft, or a folder with such a file",
        });
    }
    // Opening a pipe would wait for its writer.
    if !metadata.is_file() {
        return Err(Error::invalid_file(
            path,
            "safetensors file",
            "it is not a regular file",
        ));
    }
    let config = Some(path.with_file_name(CONFIG)).filter(|config| is_autoencoder_kl(config));
    Ok(Located {
        files: vec![path.to_owned()],
        config,
    })
}

/// A model's folder, or the folder of a pipeline that holds the model in `vae/`. Weights by diffusers' names go first:
/// beside a pipeline's folders there may be single files of whole models.
fn in_folder(folder: &Path) -> Result<Located> {
    let vae = folder.join("vae");
    let located = |parent: &Path, files| {
        let config = Some(parent.join(CONFIG)).filter(|config| config.is_file());
        Ok(Located { files, config })
    };
    for parent in [folder, &vae] {
        let weights = parent.join(WEIGHTS);
        let index = parent.join(INDEX);
        if weights.is_file() {
            return located(parent, vec![weights]);
        }
        if index.is_file() {
            return located(parent, shards(parent, &index)?);
        }
    }
    for parent in [vae.as_path(), folder] {
        if parent.is_dir()
            && let Some(only) = only_weights(parent)?
        {
            return located(parent, vec![only]);
        }
    }
    Err(Error::invalid_file(
        folder,
        "checkpoint folder",
        "neither it nor its vae/ holds a .safetensors file with a decoder",
    ))
}

/// The one `.safetensors` file of a folder, or the one of several that has a decoder. More are variants or shards without
/// their index: a choice not ours.
fn only_weights(folder: &Path) -> Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let path = entry.map_err(Error::io("read", folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // macOS leaves `._name` beside files on foreign disks.
        if name.ends_with(".safetensors") && !name.starts_with('.') && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    if found.len() > 1 {
        // A file that cannot be read may be the one that is meant, so it stays a candidate.
        found.retain(|path| super::has_decoder(path).unwrap_or(true));
    }
    if found.len() > 1 {
        let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        let reason = format!(
            "it holds several VAE checkpoints, name one of them: {}",
            names.join(", ")
        );
        return Err(Error::invalid_file(folder, "checkpoint folder", reason));
    }
    Ok(found.pop())
}

/// The files that an index names, each once.
fn shards(folder: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    let kind = "checkpoint index";
    let json = read_json(index, kind, MAX_INDEX_BYTES)?;
    let map = json.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| Error::invalid_file(index, kind, "it has no weight_map object"))?;
    let mut names = BTreeSet::new();
    for (key, name) in map {
        let name = name.as_str().filter(|name| is_inside(name)).ok_or_else(|| {
            let reason = format!("`{key}` is in {name}, which is not a file name in its folder");
            Error::invalid_file(index, kind, reason)
        })?;
        names.insert(name);
    }
    if names.is_empty() {
        return Err(Error::invalid_file(index, kind, "its weight_map is empty"));
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Whether a folder joined with `name` is something in that folder: a download must not be able to name other files.
fn is_inside(name: &str) -> bool {
    !name.is_empty()
        && Path::new(name)
            .components()
            .all(|part| matches!(part, Component::Normal(_)))
}

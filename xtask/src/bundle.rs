//! `xtask bundle`: everything a GPU host without a toolchain needs, in one archive.

use std::{
    env, fs,
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use liblzma::{
    stream::{Check, Filters, LzmaOptions, Stream},
    write::XzEncoder,
};

use crate::{Result, checkout};

/// Pack the programs, the tests for GPUs, the fixtures and the scripts for a host without a toolchain.
///
/// The host unpacks it with `tar -xJf FILE` or `python3 -m tarfile -e FILE`, and starts everything through run.sh.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The archive; by default dist/burn-vae-linux-x86_64.tar.xz in the checkout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Leave tests/fixtures out, for a host that has them: run.sh takes BURN_VAE_FIXTURES
    #[arg(long)]
    without_fixtures: bool,
}

/// The one set of features that everything is built with, so that nothing is compiled twice.
const BUILD: [&str; 5] = [
    "--release",
    "--workspace",
    "--features",
    "wgpu,cuda",
    "--message-format=json",
];

/// Programs, in the order of the archive.
const PROGRAMS: [&str; 2] = ["decode", "xtask"];

/// Integration tests that have cases for GPUs.
const TESTS: [&str; 4] = ["devices", "full_size", "high", "operations"];

/// Larger archives are refused: they are carried to hosts over slow or limited ways.
const MAX_BYTES: u64 = 60 << 20;

/// The window of the compressor: the programs share most of their code, so it spans all of them. The host needs as much
/// memory to unpack.
const WINDOW_BYTES: u32 = 128 << 20;

/// The folder that unpacking makes.
const FOLDER: &str = "burn-vae";

/// A file of the archive.
struct Entry {
    name: String,
    content: Content,
    executable: bool,
}

enum Content {
    File(PathBuf),
    Text(String),
}

pub fn run(args: &Args) -> Result {
    if env::consts::OS != "linux" {
        return Err("bundle packs programs for Linux, run it there".into());
    }
    let root = checkout::root()?;
    let output = args.output.clone().unwrap_or_else(|| {
        let name = format!("burn-vae-{}-{}.tar.xz", env::consts::OS, env::consts::ARCH);
        root.join("dist").join(name)
    });
    let programs = build(&root)?;
    let stripped = tempfile::tempdir()?;
    let mut entries = Vec::new();
    for (name, path) in programs {
        let target = stripped.path().join(name.replace('/', "-"));
        strip(&path, &target)?;
        entries.push(Entry {
            name,
            content: Content::File(target),
            executable: true,
        });
    }
    entries.extend(texts(&root));
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        entries.push(file(&root, name.into()));
    }
    entries.extend(folder(&root, "benches/side_by_side")?.into_iter().filter(|entry| {
        let name = Path::new(&entry.name);
        name.extension()
            .is_some_and(|extension| extension == "py" || extension == "txt")
    }));
    if !args.without_fixtures {
        entries.extend(folder(&root, "tests/fixtures")?);
    }
    let bytes = pack(&entries, &output, MAX_BYTES)?;
    println!("{}: {:.1} MiB, {} files", output.display(), mib(bytes), entries.len());
    Ok(())
}

/// Files that are written for the bundle.
fn texts(root: &Path) -> [Entry; 2] {
    let commit = checkout::git_commit(root).unwrap_or_else(|| "unknown".into());
    [
        Entry {
            name: "run.sh".into(),
            content: Content::Text(include_str!("bundle/run.sh").into()),
            executable: true,
        },
        Entry {
            name: "COMMIT".into(),
            content: Content::Text(format!("{commit}\n")),
            executable: false,
        },
    ]
}

/// Builds what the bundle runs: names in the archive, and where Cargo left them.
fn build(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut arguments = vec!["build"];
    arguments.extend(BUILD);
    arguments.extend(PROGRAMS.iter().flat_map(|name| ["--bin", name]));
    let mut programs = executables(root, &arguments, "bin", &PROGRAMS)?;
    programs.iter_mut().for_each(|(name, _)| *name = format!("bin/{name}"));

    let mut arguments = vec!["test", "--no-run"];
    arguments.extend(BUILD);
    arguments.extend(TESTS.iter().flat_map(|name| ["--test", name]));
    let tests = executables(root, &arguments, "test", &TESTS)?;
    programs.extend(
        tests
            .into_iter()
            .map(|(name, path)| (format!("bin/tests/{name}"), path)),
    );
    Ok(programs)
}

/// Runs Cargo and finds the executables of these names and this kind.
fn executables(root: &Path, arguments: &[&str], kind: &str, names: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    eprintln!("cargo {}", arguments.join(" "));
    let output = Command::new(cargo)
        .args(arguments)
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo does not start: {error}"))?;
    let messages = String::from_utf8(output.stdout)?;
    if !output.status.success() {
        // What the compiler said is in the messages.
        for message in messages
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        {
            if let Some(rendered) = message["message"]["rendered"].as_str() {
                eprint!("{rendered}");
            }
        }
        return Err(format!("cargo {} failed", arguments.join(" ")).into());
    }
    names
        .iter()
        .map(|name| Ok((name.to_string(), executable(&messages, kind, name)?)))
        .collect()
}

/// Where Cargo's messages say that an executable is.
fn executable(messages: &str, kind: &str, name: &str) -> Result<PathBuf> {
    let path = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|message| {
            let target = &message["target"];
            let found = target["name"] == name
                && target["kind"]
                    .as_array()
                    .is_some_and(|kinds| kinds.contains(&kind.into()));
            found.then(|| message["executable"].as_str().map(PathBuf::from))?
        });
    path.ok_or_else(|| format!("cargo built no {kind} {name}").into())
}

/// Copies a program without its symbols.
fn strip(program: &Path, target: &Path) -> Result {
    let status = Command::new("strip")
        .arg("-s")
        .arg("-o")
        .args([target, program])
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("strip {} ended with {status}", program.display()).into()),
        Err(error) => Err(format!("strip does not start ({error}); install binutils").into()),
    }
}

fn file(root: &Path, name: String) -> Entry {
    Entry {
        content: Content::File(root.join(&name)),
        name,
        executable: false,
    }
}

/// All files under a folder of the checkout, sorted by name.
fn folder(root: &Path, name: &str) -> Result<Vec<Entry>> {
    let path = root.join(name);
    let failed = |error| format!("cannot read {}: {error}", path.display());
    let mut children = fs::read_dir(&path)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .map_err(failed)?;
    children.sort_by_key(fs::DirEntry::file_name);
    let mut entries = Vec::new();
    for child in children {
        let child_name = child.file_name();
        let child_name = child_name
            .to_str()
            .ok_or_else(|| format!("{} is not named in UTF-8", child.path().display()))?;
        let child_name = format!("{name}/{child_name}");
        if child.file_type().map_err(failed)?.is_dir() {
            entries.extend(folder(root, &child_name)?);
        } else {
            entries.push(file(root, child_name));
        }
    }
    Ok(entries)
}

/// Writes the archive, in full or not at all, and says how large it became.
///
/// # Errors
/// Also when it is larger than `limit`.
fn pack(entries: &[Entry], output: &Path, limit: u64) -> Result<u64> {
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", output.display());
    let parent = match output.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(parent).map_err(failed)?;
    let temporary = tempfile::tempdir_in(parent).map_err(failed)?;
    let partial = temporary.path().join("archive");
    let mut archive = tar::Builder::new(compressor(File::create(&partial).map_err(failed)?)?);
    for entry in entries {
        append(&mut archive, entry).map_err(|error| format!("cannot pack {}: {error}", entry.name))?;
    }
    let file = archive.into_inner().and_then(XzEncoder::finish).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > limit {
        let (bytes, limit) = (mib(bytes), mib(limit));
        return Err(format!("the archive has {bytes:.1} MiB and may have {limit:.0}; try --without-fixtures").into());
    }
    fs::rename(&partial, output).map_err(failed)?;
    Ok(bytes)
}

fn compressor(file: File) -> Result<XzEncoder<File>> {
    let mut options = LzmaOptions::new_preset(6)?;
    options.dict_size(WINDOW_BYTES);
    let mut filters = Filters::new();
    filters.lzma2(&options);
    let stream = Stream::new_stream_encoder(&filters, Check::Crc64)?;
    Ok(XzEncoder::new_stream(file, stream))
}

/// Without times and owners: the same files give the same archive.
fn append(archive: &mut tar::Builder<impl Write>, entry: &Entry) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(if entry.executable { 0o755 } else { 0o644 });
    let name = format!("{FOLDER}/{}", entry.name);
    match &entry.content {
        Content::Text(text) => {
            header.set_size(text.len() as u64);
            archive.append_data(&mut header, name, text.as_bytes())
        }
        Content::File(path) => {
            let file = File::open(path)?;
            header.set_size(file.metadata()?.len());
            archive.append_data(&mut header, name, file)
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str, content: &str, executable: bool) -> Entry {
        Entry {
            name: name.into(),
            content: Content::Text(content.into()),
            executable,
        }
    }

    fn unpacked(archive: &Path) -> Vec<(String, u32, String)> {
        let decoder = liblzma::read::XzDecoder::new(File::open(archive).unwrap());
        let mut archive = tar::Archive::new(decoder);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let content = std::io::read_to_string(&mut entry).unwrap();
            let path = entry.path().unwrap().display().to_string();
            (path, entry.header().mode().unwrap(), content)
        });
        entries.collect()
    }

    #[test]
    fn an_archive_holds_every_file_once_with_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("new/bundle.tar.xz");
        let entries = [text("bin/decode", "\x7fELF", true), text("COMMIT", "abc\n", false)];
        let bytes = pack(&entries, &output, 1 << 20).unwrap();
        assert_eq!(bytes, fs::metadata(&output).unwrap().len());
        let expected = [
            ("burn-vae/bin/decode".to_string(), 0o755, "\x7fELF".to_string()),
            ("burn-vae/COMMIT".to_string(), 0o644, "abc\n".to_string()),
        ];
        assert_eq!(unpacked(&output), expected);
        assert_eq!(fs::read_dir(output.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn an_archive_over_the_limit_is_refused_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("bundle.tar.xz");
        let error = pack(&[text("COMMIT", "abc\n", false)], &output, 10).unwrap_err();
        assert!(error.to_string().contains("try --without-fixtures"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_is_gone_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("bundle.tar.xz");
        let gone = file(folder.path(), "tests/fixtures/gone".into());
        let error = pack(&[gone], &output, 10).unwrap_err().to_string();
        assert!(error.starts_with("cannot pack tests/fixtures/gone: "), "{error}");
    }

    #[test]
    fn cargo_s_messages_tell_a_test_from_a_program_of_the_same_name() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"devices","kind":["lib"]},"executable":null}
{"reason":"compiler-artifact","target":{"name":"devices","kind":["bin"]},"executable":"/t/devices"}
{"reason":"compiler-artifact","target":{"name":"devices","kind":["test"]},"executable":"/t/deps/devices-1f"}
{"reason":"build-finished","success":true}"#;
        let found = |kind, name| executable(messages, kind, name).map_err(|error| error.to_string());
        assert_eq!(found("test", "devices"), Ok("/t/deps/devices-1f".into()));
        assert_eq!(found("bin", "devices"), Ok("/t/devices".into()));
        assert_eq!(found("test", "decode"), Err("cargo built no test decode".into()));
    }

    /// A bundle of shell scripts that print what they were started with.
    fn scripts() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let script =
            "#!/bin/sh\necho \"$0 $*|$BURN_VAE_FIXTURES|$CUDA_PATH|$LD_LIBRARY_PATH|${BURN_VAE_REQUIRE_DEVICE:-}\"\n";
        let output = folder.path().join("bundle.tar.xz");
        let entries = [
            text("bin/decode", script, true),
            text("bin/tests/devices", script, true),
            text("run.sh", include_str!("bundle/run.sh"), true),
        ];
        pack(&entries, &output, 1 << 20).unwrap();
        // By the documented command; and a file that this process never opened for writing is never too busy to run.
        let unpacked = Command::new("tar")
            .arg("-xJf")
            .arg(output)
            .arg("-C")
            .arg(folder.path())
            .status();
        assert!(unpacked.unwrap().success());
        folder
    }

    /// Exit code, standard output and error of run.sh.
    fn run_sh(folder: &Path, toolkit: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = Command::new(folder.join("burn-vae/run.sh"))
            .args(arguments)
            .env("CUDA_PATH", folder.join(toolkit))
            .env("LD_LIBRARY_PATH", folder.join("driver"))
            .env_remove("BURN_VAE_FIXTURES")
            .env_remove("BURN_VAE_REQUIRE_DEVICE")
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    #[test]
    #[cfg(unix)]
    fn run_sh_names_what_cuda_lacks_and_runs_its_arguments() {
        let folder = scripts();
        let bundle = folder.path().join("burn-vae");
        let (code, stdout, stderr) = run_sh(folder.path(), "no-toolkit", &["decode", "a b", "c"]);
        assert_eq!(code, Some(0), "{stderr}");
        let expected = format!("{0}/bin/decode a b c|{0}/tests/fixtures|", bundle.display());
        assert!(stdout.starts_with(&expected), "{stdout}");
        assert!(stderr.contains("run.sh: libnvrtc was not found under "), "{stderr}");
        assert!(
            stderr.contains("run.sh: the CUDA headers were not found in "),
            "{stderr}"
        );
    }

    #[test]
    #[cfg(unix)]
    fn run_sh_is_silent_where_nothing_is_missing() {
        let folder = scripts();
        for file in [
            "toolkit/include/cuda_fp16.h",
            "toolkit/lib/libnvrtc.so.13",
            "driver/libcuda.so.1",
        ] {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let (code, stdout, stderr) = run_sh(folder.path(), "toolkit", &["tests"]);
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        let library = folder.path().join("toolkit/lib");
        assert!(stdout.contains("/bin/tests/devices cuda|"), "{stdout}");
        assert!(stdout.contains(&format!("|{}:", library.display())), "{stdout}");
        assert!(stdout.ends_with("|cuda\n"), "{stdout}");
    }

    #[test]
    #[cfg(unix)]
    fn run_sh_refuses_what_is_not_in_the_bundle() {
        let folder = scripts();
        for arguments in [&[][..], &["encode"]] {
            let (code, stdout, stderr) = run_sh(folder.path(), "no-toolkit", arguments);
            assert_eq!((code, stdout.as_str()), (Some(2), ""));
            assert!(stderr.contains("./run.sh decode LATENTS"), "{stderr}");
        }
    }
}

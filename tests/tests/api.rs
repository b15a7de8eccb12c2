//! The public API, as a list that is kept under version control: a change of it is a change of docs/public-api.txt, and seen.
//!
//! Read from the sources, which rustfmt keeps regular: what is `pub` in a file counts, whether or not its module is.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The crates that people depend on or meet through `burn-vae`; see CONTRIBUTING.md.
const CRATES: [&str; 5] = [
    "crates/burn-vae",
    "crates/vae-blocks",
    "crates/vae-io",
    "models/autoencoder-kl",
    "models/flux2",
];

#[test]
fn the_public_api_is_the_one_that_is_written_down() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let snapshot = root.join("docs/public-api.txt");
    let found: String = CRATES
        .iter()
        .map(|name| list(name, &root.join(name).join("src")))
        .collect();
    if std::env::var_os("BURN_VAE_WRITE_API").is_some() {
        fs::write(&snapshot, &found).unwrap();
    }
    let written = fs::read_to_string(&snapshot).unwrap_or_default();
    let lines = |text: &str| text.lines().map(str::to_string).collect::<BTreeSet<_>>();
    let (found_lines, written_lines) = (lines(&found), lines(&written));
    let removed: Vec<_> = written_lines
        .difference(&found_lines)
        .map(|line| format!("- {line}"))
        .collect();
    let added: Vec<_> = found_lines
        .difference(&written_lines)
        .map(|line| format!("+ {line}"))
        .collect();
    assert!(
        found == written,
        "the public API changed:\n{}\n{}\nIf that is meant, set BURN_VAE_WRITE_API=1, run this test once, and see the semver \
         policy in CONTRIBUTING.md.",
        removed.join("\n"),
        added.join("\n")
    );
}

#[test]
fn the_list_has_functions_fields_variants_and_traits_but_nothing_private() {
    let source = "\
/// Text.
#[derive(Debug, Clone)]
pub struct A {
    /// Text.
    pub field: usize,
    hidden: usize,
}

struct Hidden;

impl Hidden {
    pub fn hidden(&self) {}
}

impl A {
    /// pub fn in_text()
    pub fn long(
        &self,
        x: usize,
    ) -> usize {
        pub_fn(x)
    }

    fn private(&self) {}

    pub(crate) fn internal(&self) {}
}

impl fmt::Display for A {
    fn fmt(&self) {}
}

#[non_exhaustive]
pub enum E {
    #[error(
        \"text\"
    )]
    One,
    Two {
        x: usize,
    },
}

pub trait T {
    fn needed(&self) -> usize;

    fn given(&self) -> usize {
        1
    }
}

#[cfg(test)]
mod tests {
    pub fn in_tests() {}
}
";
    let items = items(source, &public_types(source));
    let expected = [
        "#[derive(Debug, Clone)] pub struct A",
        "A: pub field: usize,",
        "A: pub fn long( &self, x: usize, ) -> usize",
        "impl fmt::Display for A",
        "#[non_exhaustive] pub enum E",
        "E: One,",
        "E: Two { x: usize, },",
        "pub trait T",
        "T: fn needed(&self) -> usize;",
        "T: fn given(&self) -> usize",
    ];
    assert_eq!(items, expected);
}

/// The items of a crate, a line each, in the order of its files.
fn list(name: &str, folder: &Path) -> String {
    let mut files = Vec::new();
    sources(folder, &mut files);
    let sources: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let types: BTreeSet<String> = sources.iter().flat_map(|source| public_types(source)).collect();
    let items = sources.iter().flat_map(|source| items(source, &types));
    let lines: Vec<String> = items.map(|item| format!("  {item}\n")).collect();
    format!("{name}\n{}", lines.concat())
}

fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    for path in paths {
        match path.is_dir() {
            true => sources(&path, files),
            false => files.push(path),
        }
    }
}

/// The name that an item or an `impl` is about: `A` of `pub struct A<'a> {`, of `impl<T> A<T> {` and of `impl X for A {`.
fn subject(header: &str) -> String {
    let words = header.split(" for ").last().unwrap_or_default();
    let words = match words.strip_prefix("impl<") {
        Some(rest) => rest.split_once("> ").map_or("", |(_, name)| name),
        None => words.trim_start_matches("impl "),
    };
    let name = words.split(['<', '{', '(', ';', ':']).next().unwrap_or_default();
    name.split_whitespace().last().unwrap_or_default().to_string()
}

/// Lines without comments, attributes other than those that count, and tests.
fn code(source: &str) -> Vec<&str> {
    let source = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let mut lines = Vec::new();
    let mut in_attribute = false;
    for line in source.lines() {
        let text = line.trim();
        let counts = text.starts_with("#[derive") || text == "#[non_exhaustive]";
        if in_attribute || (text.starts_with("#[") && !counts) {
            in_attribute = !text.ends_with(']');
        } else if !text.is_empty() && !text.starts_with("//") {
            lines.push(line);
        }
    }
    lines
}

fn public_types(source: &str) -> BTreeSet<String> {
    let is_type = |line: &&&str| {
        ["pub struct ", "pub enum ", "pub trait "]
            .iter()
            .any(|word| line.starts_with(word))
    };
    code(source).iter().filter(is_type).map(|line| subject(line)).collect()
}

fn items(source: &str, types: &BTreeSet<String>) -> Vec<String> {
    let lines = code(source);
    let mut items = Vec::new();
    let mut attributes = String::new();
    // The item that the lines below are in, if they count: its name, and whether they need `pub` to count.
    let mut within: Option<(String, bool)> = None;
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        let indent = line.len() - line.trim_start().len();
        let text = line.trim();
        at += 1;
        if indent == 0 && text.starts_with("#[") {
            attributes += text;
            attributes += " ";
            continue;
        }
        let is_public = text.starts_with("pub ");
        let counts = match (indent, &within) {
            (0, _) => is_public || text.starts_with("impl"),
            (4, Some((_, needs_pub))) => is_public || !(*needs_pub || text.starts_with('}')),
            _ => false,
        };
        if indent == 0 {
            within = None;
        }
        if counts {
            // To the end of the signature; a list of names or an enum's variant to its own end.
            let is_variant = indent == 4 && matches!(&within, Some((_, false))) && !text.contains("fn ");
            let is_whole = |item: &str| {
                let balanced = |open, close| item.matches(open).count() == item.matches(close).count();
                balanced('(', ')')
                    && balanced('[', ']')
                    && match is_variant || item.starts_with("pub use ") {
                        true => balanced('{', '}') && item.ends_with([',', ';']),
                        false => item.ends_with(['{', ';', '}']) || (indent == 4 && item.ends_with(',')),
                    }
            };
            let mut item = text.to_string();
            while !is_whole(&item) && at < lines.len() {
                item += " ";
                item += lines[at].trim();
                at += 1;
            }
            let opens = item.ends_with('{');
            let item = item.trim_end_matches(" {").trim_end_matches('{').trim_end().to_string();
            if indent == 0 {
                let name = subject(&item);
                let is_impl = text.starts_with("impl");
                let is_known = types.contains(&name);
                let of_trait = is_impl && item.contains(" for ");
                if !is_impl || (of_trait && is_known) {
                    items.push(format!("{attributes}{item}"));
                }
                if opens && is_known && !of_trait {
                    let needs_pub = is_impl || item.contains("pub struct ");
                    within = Some((name, needs_pub));
                }
            } else if let Some((name, _)) = &within {
                items.push(format!("{name}: {item}"));
            }
        }
        if indent == 0 {
            attributes.clear();
        }
    }
    items
}

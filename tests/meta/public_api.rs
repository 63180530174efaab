//! Tests that the public API equals `public_api.txt`: the items and members that rustdoc shows to a user of
//! the library, who builds it without the feature `internal`.
//!
//! `CINCH_UPDATE_API=1 cargo test --test meta public_api` rewrites the list.

use crate::source::root;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Kinds of items, as rustdoc names them in links and files.
const ITEMS: &[&str] = &[
    "mod",
    "struct",
    "enum",
    "union",
    "trait",
    "fn",
    "constant",
    "static",
    "type",
    "macro",
    "traitalias",
    "attr",
    "derive",
];

/// Kinds of members, as rustdoc names them in the ids of a page.
const MEMBERS: &[&str] = &[
    "variant",
    "structfield",
    "associatedconstant",
    "associatedtype",
    "method",
    "tymethod",
];

/// An item of the API.
struct Item {
    /// Kind and path of the item, as in `struct arrays::Elements`.
    name: String,
    /// HTML text of the item's rustdoc page.
    html: String,
}

/// Writes the rustdoc pages of a user's build, and returns the folder of the crate. Warnings count as errors,
/// so that public comments link to public items only.
fn build_pages() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("public_api");
    let built = Command::new(env!("CARGO"))
        .args(["doc", "--locked", "--lib", "--no-deps"])
        .args(["--package", "cinch-ccl", "--target-dir"])
        .arg(&target)
        .env("CINCH_CUDA", "0")
        .env("RUSTDOCFLAGS", "-D warnings")
        .current_dir(root())
        .output()
        .expect("cargo");
    let text = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "cargo doc:\n{text}");
    target.join("doc/cinch")
}

/// Returns all items, modules included, in order of their paths.
fn items() -> &'static [Item] {
    static ALL: OnceLock<Vec<Item>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut items = Vec::new();
        collect(&build_pages(), "", &mut items);
        items.sort_by(|a, b| path(&a.name).cmp(path(&b.name)));
        items
    })
}

/// Returns the path of an item without its kind.
fn path(name: &str) -> &str {
    name.split_once(' ').unwrap().1
}

/// Adds the items of the module `prefix`, whose pages are in `folder`.
fn collect(folder: &Path, prefix: &str, items: &mut Vec<Item>) {
    let read = |file: &str| {
        let page = folder.join(file);
        fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()))
    };
    for (kind, file) in links(&read("index.html")) {
        let stem = file.strip_suffix("/index.html");
        let stem = stem.or_else(|| {
            file.strip_suffix(".html")?
                .strip_prefix(kind)?
                .strip_prefix('.')
        });
        let stem = stem.unwrap_or_else(|| panic!("a {kind} in {file}"));
        items.push(Item {
            name: format!("{kind} {prefix}{stem}"),
            html: read(&file),
        });
        if kind == "mod" {
            collect(&folder.join(stem), &format!("{prefix}{stem}::"), items);
        }
    }
}

/// Returns kind and file of the items that the page of a module lists. Only links to these items have a
/// `class` attribute.
fn links(html: &str) -> Vec<(&'static str, String)> {
    let of = |kind: &'static str| {
        let begin = format!("<a class=\"{kind}\" href=\"");
        let rests: Vec<&str> = html.split(&begin).skip(1).collect();
        let files = rests
            .into_iter()
            .map(|rest| rest[..rest.find('"').unwrap()].to_string());
        files.map(|file| (kind, file)).collect::<Vec<_>>()
    };
    ITEMS.iter().flat_map(|kind| of(kind)).collect()
}

/// Returns the part of a page in front of the implementations of traits.
fn own_part(html: &str) -> &str {
    let end = [
        "trait-implementations",
        "synthetic-implementations",
        "foreign-impls",
        "implementors",
    ]
    .iter()
    .filter_map(|id| html.find(&format!("<h2 id=\"{id}\"")))
    .min();
    &html[..end.unwrap_or(html.len())]
}

/// Returns kind and name of the members on the page of an item, in order of the page.
fn members(html: &str) -> Vec<String> {
    let mut found = Vec::new();
    for rest in own_part(html).split(" id=\"").skip(1) {
        let id = &rest[..rest.find('"').unwrap()];
        let member = id
            .split_once('.')
            .filter(|(kind, _)| MEMBERS.contains(kind));
        // For a variant `Tensor` with a field `refresh`, rustdoc writes three HTML ids: `variant.Tensor`,
        // `variant.Tensor.fields` and `variant.Tensor.field.refresh`.
        if let Some((kind, name)) = member.filter(|(_, name)| !name.ends_with(".fields")) {
            found.push(format!("{kind} {}", name.replace(".field.", "::")));
        }
    }
    found
}

/// Returns the list as text, with each item on a line and its members on the lines below.
fn list() -> String {
    let mut text = String::new();
    for item in items() {
        text += &format!("{}\n", item.name);
        // An alias has the members of the type that it stands for.
        let is_alias = item.name.starts_with("type ");
        for member in members(&item.html).iter().filter(|_| !is_alias) {
            text += &format!("    {member}\n");
        }
    }
    text
}

/// Returns the lines of a list, with the item's name in front of each of its members.
fn qualified(list: &str) -> Vec<String> {
    let mut item = "";
    let line = |line| match str::strip_prefix(line, "    ") {
        Some(member) => format!("{item}: {member}"),
        None => {
            item = line;
            line.to_string()
        }
    };
    list.lines().map(line).collect()
}

/// Returns every text between a `begin` and the next `end`.
fn enclosed<'a>(html: &'a str, begin: &str, end: &str) -> Vec<&'a str> {
    let parts = html.split(begin).skip(1);
    parts.filter_map(|part| part.split(end).next()).collect()
}

/// Returns the names of types in a signature that link to no page: types that a user cannot name.
fn unlinked_types(signature: &str) -> Vec<String> {
    // Every type with a link is public, or belongs to the standard library, so links are removed.
    let mut text = String::new();
    for (at, part) in signature.split("<a ").enumerate() {
        let behind = match at {
            0 => part,
            _ => part.split_once("</a>").map_or("", |(_, behind)| behind),
        };
        text += behind;
    }
    let mut bare = String::new();
    for (at, part) in text.split('<').enumerate() {
        bare += match at {
            0 => part,
            _ => part.split_once('>').map_or("", |(_, behind)| behind),
        };
        bare.push(' ');
    }
    let words = bare.split(|c: char| !c.is_alphanumeric() && c != '_');
    let is_type = |word: &&str| {
        word.starts_with(char::is_uppercase) && word.contains(char::is_lowercase) && *word != "Self"
    };
    words.filter(is_type).map(String::from).collect()
}

#[test]
fn public_api_is_the_list() {
    let file = root().join("tests/meta/public_api.txt");
    let list = list();
    let count = list.lines().filter(|line| !line.starts_with(' ')).count();
    assert!(count > 30, "only {count} items were found:\n{list}");
    if std::env::var_os("CINCH_UPDATE_API").is_some() {
        return fs::write(file, list).unwrap();
    }
    let expected = fs::read_to_string(file).unwrap_or_default();
    let (now, then) = (qualified(&list), qualified(&expected));
    let missing = |from: &[String], to: &[String], mark: &str| -> String {
        let lines = from.iter().filter(|line| !to.contains(line));
        lines.map(|line| format!("{mark} {line}\n")).collect()
    };
    assert!(
        list == expected,
        "the public API differs from tests/meta/public_api.txt; if this is meant, \
         CINCH_UPDATE_API=1 cargo test --test meta public_api rewrites the list:\n{}{}",
        missing(&now, &then, "+"),
        missing(&then, &now, "-")
    );
}

#[test]
fn public_signatures_name_public_types() {
    let mut leaks = Vec::new();
    let mut checked = 0;
    for item in items() {
        let own = own_part(&item.html);
        let mut signatures = enclosed(own, "<h4 class=\"code-header\">", "</h4>");
        signatures.extend(enclosed(own, "<h3 class=\"code-header\">", "</h3>"));
        signatures.extend(enclosed(
            own,
            "class=\"structfield section-header\"",
            "</span>",
        ));
        if item.name.starts_with("fn ") || item.name.starts_with("constant ") {
            signatures.extend(enclosed(own, "class=\"rust item-decl\">", "</pre>"));
        }
        checked += signatures.len();
        // The name of a variant stands in front of its types, without a link.
        let members = members(&item.html);
        for signature in signatures {
            let mut found = unlinked_types(signature);
            found.retain(|name| !members.contains(&format!("variant {name}")));
            let found = found.into_iter();
            leaks.extend(found.map(|leak| format!("{}: {leak} in {signature}", item.name)));
        }
    }
    assert!(checked > 100, "only {checked} signatures were found");
    assert!(leaks.is_empty(), "{}", leaks.join("\n"));
}

#[test]
fn public_items_are_not_hidden() {
    for source in crate::source::sources(&["src"], &[".rs"]) {
        let hidden = source.text.contains("doc(hidden)");
        assert!(
            !hidden,
            "{}: what is hidden is public all the same",
            source.path
        );
    }
}

#[test]
fn pages_are_read_as_rustdoc_writes_them() {
    let index = r#"<dt><a class="struct" href="struct.Call.html" title="x">Call</a></dt>
        <dd>A <a href="struct.Other.html">call</a></dd><a class="mod" href="a/index.html">"#;
    assert_eq!(
        links(index),
        [
            ("mod", "a/index.html".into()),
            ("struct", "struct.Call.html".into())
        ]
    );
    let page = r#"<span id="structfield.a" class="x"><section id="method.b" class="method">
        <h2 id="trait-implementations"><section id="method.fmt" class="x">"#;
    assert_eq!(members(page), ["structfield a", "method b"]);
    let signature = r#"pub fn <a href="x" class="fn">f</a>(a: &amp;Fault) -> <a class="enum" href="y">Result</a>&lt;T&gt;"#;
    assert_eq!(unlinked_types(signature), ["Fault"]);
}

//! The tables that are part of the library.

use super::Table;
use crate::error::Result;
use crate::sys::fork_safe::First;
use std::sync::Arc;

/// Every table: its name, and its text, as `cinch tune` wrote it, but for lines that it says were left
/// out or are of another run. This is the one list of them.
const TABLES: &[(&str, &str)] = &[
    ("h200x2.tune", include_str!("../tuned/h200x2.tune")),
    ("h200x4.tune", include_str!("../tuned/h200x4.tune")),
    ("h200x8.tune", include_str!("../tuned/h200x8.tune")),
];

/// The tables, parsed once a process.
///
/// # Errors
/// Those of [`Table::parse`], which a test rules out.
pub fn tables() -> Result<Vec<Arc<Table>>> {
    static PARSED: First<Result<Vec<Arc<Table>>>> = First::new();
    PARSED
        .get_or_make(|| {
            TABLES
                .iter()
                .map(|(name, text)| Table::parse(name, text).map(Arc::new))
                .collect()
        })
        .clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn every_table_is_one_for_a_place_of_its_own_and_has_no_cliff() {
        let mut places = BTreeSet::new();
        for table in tables().unwrap() {
            let header = &table.header;
            let place = (header.gpu.clone(), header.ranks, header.links.clone());
            assert!(places.insert(place), "{}: two tables for one", table.name);
            assert_eq!(table.cliffs(), Vec::<String>::new(), "{}", table.name);
        }
    }

    /// A file that nobody lists would be a table that nobody uses.
    #[test]
    fn every_file_is_listed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/plan/tuned");
        let files = std::fs::read_dir(folder).map_or_else(
            |_| BTreeSet::new(),
            |files| {
                let names = files.map(|file| file.unwrap().file_name());
                names.map(|name| name.into_string().unwrap()).collect()
            },
        );
        let listed: BTreeSet<String> = TABLES.iter().map(|(name, _)| (*name).into()).collect();
        assert_eq!(files, listed);
    }
}

//! Lists the tuning tables that are embedded in the library.

use super::TuningTable;
use crate::error::Result;
use crate::sys::fork_safe::ForkSafeOnce;
use std::sync::Arc;

/// Name and text of every embedded table. The text is as `cinch tune` wrote it, except for the
/// lines that its remarks list. To embed another table, add a line here.
const TABLES: &[(&str, &str)] = &[
    ("h200x2.tune", include_str!("../tuned/h200x2.tune")),
    ("h200x4.tune", include_str!("../tuned/h200x4.tune")),
    ("h200x8.tune", include_str!("../tuned/h200x8.tune")),
];

/// Returns the embedded tables, parsed once per process.
///
/// # Errors
/// As for [`TuningTable::parse`]; a test checks that all of them parse.
pub fn tables() -> Result<Vec<Arc<TuningTable>>> {
    static PARSED: ForkSafeOnce<Result<Vec<Arc<TuningTable>>>> = ForkSafeOnce::new();
    PARSED
        .get_or_init(|| {
            TABLES
                .iter()
                .map(|(name, text)| TuningTable::parse(name, text).map(Arc::new))
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

    /// A file in the folder that is missing from the list would never be used.
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

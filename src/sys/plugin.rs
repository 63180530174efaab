//! Plug-ins: shared libraries that a setting names and that another project wrote, found as NCCL finds its own.

use super::loader::Library;
use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

/// Value of a setting that stands for no plug-in.
const NONE: &str = "none";
/// Value of a setting that stands for the program itself.
const STATIC: &str = "STATIC_PLUGIN";

/// An open plug-in, which is never unloaded.
pub struct PluginLibrary(Library);

/// The reason why there is no plug-in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PluginAbsence {
    /// The setting is `none`, or it is unset and no library has the default name.
    Unwanted,
    /// A plug-in is there or is named by the setting, and cannot be opened. The text has the loader's reason for each
    /// name.
    Failed(String),
}

impl PluginLibrary {
    /// Opens the plug-in that `setting` names: a path, a file name, or a name `NAME` for `PREFIX-NAME.so`. Without a
    /// setting opens `PREFIX.so`. `STATIC_PLUGIN` is the program itself.
    ///
    /// # Errors
    /// The reason why no plug-in is open.
    pub fn open(prefix: &str, setting: Option<&str>) -> Result<PluginLibrary, PluginAbsence> {
        let Some(setting) = setting else {
            let name = format!("{prefix}.so");
            let library = open_file(&name).map(PluginLibrary);
            // The reason has another name if a library is absent that the plug-in needs.
            return library.map_err(|reason| {
                match reason.contains(&name) && reason.contains("No such file") {
                    true => PluginAbsence::Unwanted,
                    false => PluginAbsence::Failed(reason),
                }
            });
        };
        if setting.eq_ignore_ascii_case(NONE) {
            return Err(PluginAbsence::Unwanted);
        }
        if setting.eq_ignore_ascii_case(STATIC) {
            return Library::program()
                .map(PluginLibrary)
                .map_err(PluginAbsence::Failed);
        }
        let mut reasons = Vec::new();
        for name in names(prefix, setting) {
            match open_file(&name) {
                Ok(library) => return Ok(PluginLibrary(library)),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(PluginAbsence::Failed(reasons.join("; ")))
    }

    /// Returns the name by which the plug-in was opened.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the address of the symbol `name`; `None` if the plug-in lacks it.
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        NonNull::new(self.0.symbol(name)?)
    }
}

/// Returns the files that `setting` may name, in the order in which they are tried.
fn names(prefix: &str, setting: &str) -> Vec<String> {
    let is_file = setting.contains('/') || (setting.starts_with("lib") && setting.ends_with(".so"));
    let mut names = vec![setting.to_string()];
    if !is_file {
        names.push(format!("{prefix}-{setting}.so"));
    }
    names
}

fn open_file(name: &str) -> Result<Library, String> {
    let name = CString::new(name).map_err(|_| "a name contains a zero".to_string())?;
    Library::open(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_names_a_path_a_file_or_a_name() {
        let names = |setting| names("libnccl-tuner", setting);
        assert_eq!(names("/opt/x.so"), ["/opt/x.so"]);
        assert_eq!(names("./x"), ["./x"]);
        assert_eq!(names("libx.so"), ["libx.so"]);
        assert_eq!(names("x"), ["x", "libnccl-tuner-x.so"]);
        assert_eq!(names("libx"), ["libx", "libnccl-tuner-libx.so"]);
        assert_eq!(names("x.so"), ["x.so", "libnccl-tuner-x.so.so"]);
    }

    #[test]
    fn absent_plugin_is_a_failure_only_if_it_was_named() {
        let open = |setting| PluginLibrary::open("libcinch-absent", setting).err();
        assert_eq!(open(None), Some(PluginAbsence::Unwanted));
        assert_eq!(open(Some("None")), Some(PluginAbsence::Unwanted));
        let Some(PluginAbsence::Failed(reason)) = open(Some("x")) else {
            panic!("a library of that name was opened");
        };
        assert!(reason.contains("libcinch-absent-x.so"), "{reason}");
    }

    #[test]
    fn default_plugin_that_is_damaged_is_a_failure() {
        let prefix = std::env::temp_dir().join(format!("cinch-plugin-{}", std::process::id()));
        let library = prefix.with_extension("so");
        std::fs::write(&library, "no library").unwrap();
        let opened = PluginLibrary::open(prefix.to_str().unwrap(), None).err();
        std::fs::remove_file(&library).unwrap();
        assert!(
            matches!(opened, Some(PluginAbsence::Failed(_))),
            "{opened:?}"
        );
    }

    #[test]
    fn program_is_a_plugin() {
        let program = PluginLibrary::open("libcinch-absent", Some("static_plugin")).unwrap();
        assert!(program.symbol(c"malloc").is_some());
        assert!(program.symbol(c"ncclProfiler_v0").is_none());
    }
}

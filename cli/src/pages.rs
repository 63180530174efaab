//! Shell completions and man pages, made from the definitions of the tool's options.

use crate::{Cli, ExitResult, FAILURE};
use clap::CommandFactory;
use clap_complete::Shell;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Writes the script with which `shell` completes the tool's options.
pub fn write_completions(shell: Shell, out: &mut dyn Write) -> io::Result<()> {
    // The generator ends the process if it cannot write, so it writes to memory.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cinch", &mut script);
    out.write_all(&script)
}

/// Writes `cinch.1`, and `cinch-NAME.1` for each subcommand, into `folder`.
///
/// # Errors
/// Returns an exit code and an error message if a page cannot be written.
pub fn write_man_pages(folder: &Path) -> ExitResult {
    let mut tool = Cli::command().disable_help_subcommand(true);
    tool.build();
    let mut pages = vec![("cinch".to_string(), tool.clone())];
    let visible = tool.get_subcommands().filter(|it| !it.is_hide_set());
    pages.extend(visible.map(|subcommand| {
        let name = format!("cinch-{}", subcommand.get_name());
        (name.clone(), subcommand.clone().display_name(name))
    }));
    for (name, command) in pages {
        let path = folder.join(format!("{name}.1"));
        let written = File::create(&path)
            .and_then(|mut file| clap_mangen::Man::new(command).render(&mut file));
        written.map_err(|error| (FAILURE, format!("{}: {error}", path.display())))?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_complete_subcommands_and_options_of_every_shell() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            write_completions(shell, &mut script).unwrap();
            let script = String::from_utf8(script).unwrap();
            for word in ["bench", "topo", "transport", "explain"] {
                assert!(script.contains(word), "{shell} lacks {word}");
            }
        }
    }

    #[test]
    fn every_visible_subcommand_has_a_page_with_its_options() {
        let folder = std::env::temp_dir().join(format!("cinch-pages-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert_eq!(write_man_pages(&folder), Ok(0));
        let page = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        for subcommand in Cli::command().get_subcommands() {
            let name = format!("cinch-{}.1", subcommand.get_name());
            assert_eq!(
                folder.join(&name).exists(),
                !subcommand.is_hide_set(),
                "{name}"
            );
        }
        assert!(page("cinch.1").contains("cinch\\-bench(1)"));
        assert!(page("cinch-run.1").contains("\\-\\-preload"));
        std::fs::remove_dir_all(&folder).unwrap();
        let (code, sentence) = write_man_pages(&folder).unwrap_err();
        assert!(
            code == FAILURE && sentence.contains("cinch.1"),
            "{sentence}"
        );
    }
}

//! A result of `cinch doctor`: what was checked, its numbers, and what to do about it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// How serious a result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing to do.
    Ok,
    /// Something works worse than it could, or is probably not meant.
    Warning,
    /// Ranks will not start, or not communicate.
    Error,
}

impl Severity {
    fn name(self) -> &'static str {
        match self {
            Severity::Ok => "ok",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckResult {
    /// Part of the machine, such as `limits`.
    pub area: String,
    /// Name of the check, such as `memlock`.
    pub check: String,
    pub level: Severity,
    /// Observation, as a phrase.
    pub found: String,
    /// Advice; `None` for results that are ok.
    pub advice: Option<String>,
    /// The numbers, by name; names end in their unit.
    pub values: BTreeMap<String, Value>,
}

impl CheckResult {
    /// Creates a result that is ok.
    pub fn ok(area: &str, check: &str, found: impl Into<String>) -> CheckResult {
        CheckResult {
            area: area.into(),
            check: check.into(),
            level: Severity::Ok,
            found: found.into(),
            advice: None,
            values: BTreeMap::new(),
        }
    }

    /// Creates a warning.
    pub fn warning(
        area: &str,
        check: &str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> CheckResult {
        CheckResult {
            level: Severity::Warning,
            advice: Some(advice.into()),
            ..CheckResult::ok(area, check, found)
        }
    }

    /// Creates an error.
    pub fn error(
        area: &str,
        check: &str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> CheckResult {
        CheckResult {
            level: Severity::Error,
            ..CheckResult::warning(area, check, found, advice)
        }
    }

    /// Adds a number or text by its name.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> CheckResult {
        self.values.insert(name.into(), value.into());
        self
    }
}

/// Prints results by area, each with its level, and advice below it.
///
/// # Errors
/// Returns the writer's errors.
pub fn write(results: &[CheckResult], out: &mut dyn Write) -> io::Result<()> {
    let mut area = "";
    for result in results {
        if result.area != area {
            area = &result.area;
            writeln!(out, "\n{area}")?;
        }
        let (level, check) = (result.level.name(), &result.check);
        writeln!(out, "  {level:<8} {check:<13} {}", result.found)?;
        if let Some(advice) = &result.advice {
            writeln!(out, "  {:<8} {:<13} -> {advice}", "", "")?;
        }
    }
    let count = |level| results.iter().filter(|it| it.level == level).count();
    writeln!(
        out,
        "\n{} ok, {} warnings, {} errors",
        count(Severity::Ok),
        count(Severity::Warning),
        count(Severity::Error)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_printed_by_area_with_their_advice() {
        let results = [
            CheckResult::ok("limits", "nofile", "1024 descriptors").with("nofile", 1024),
            CheckResult::error("limits", "memlock", "64 KiB", "raise it"),
            CheckResult::warning("network", "chosen", "docker0", "set CINCH_SOCKET_IFNAME"),
        ];
        let mut text = Vec::new();
        write(&results, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let expected = "\nlimits\n  \
            ok       nofile        1024 descriptors\n  \
            error    memlock       64 KiB\n                         -> raise it\n\nnetwork\n  \
            warning  chosen        docker0\n                         -> set CINCH_SOCKET_IFNAME\n\n\
            1 ok, 1 warnings, 1 errors\n";
        assert_eq!(text, expected);
        let back: Vec<CheckResult> =
            serde_json::from_str(&serde_json::to_string(&results).unwrap()).unwrap();
        assert_eq!(back, results);
    }
}

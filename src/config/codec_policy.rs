//! The codec of calls that name no codec, by process and communicator.
//!
//! Three places set the codec of a call: the process (`CINCH_CODEC`), the communicator (a rule on
//! its name, or the program) and the call. The narrowest place that is set wins; `off` is final for
//! narrower places. The choice depends on settings alone, not on data or on one rank: ranks with
//! equal settings make the same choice.

use super::Config;
use super::kinds::{Parsed, parse_bytes};
use crate::types::{CodecSetting, CodecSpec, Collective};
use std::fmt;

/// A set of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveSet(u16);

impl CollectiveSet {
    /// The collectives that carry gradients. Other collectives carry weights, tokens, indices and
    /// pickles.
    pub const GRADIENTS: CollectiveSet =
        CollectiveSet(1 << Collective::AllReduce as u16 | 1 << Collective::ReduceScatter as u16);

    /// Returns whether `one` is in the set.
    pub const fn has(self, one: Collective) -> bool {
        self.0 & 1 << one as u16 != 0
    }

    /// Parses names of collectives that are separated by `separator`.
    pub(super) fn parse(text: &str, separator: char) -> Parsed<CollectiveSet> {
        let mut bits = 0;
        for name in text.split(separator).map(str::trim) {
            let one = Collective::from_name(name)
                .ok_or_else(|| format!("no collective is called \"{name}\""))?;
            bits |= 1 << one as u16;
        }
        Ok(CollectiveSet(bits))
    }
}

impl fmt::Display for CollectiveSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for one in Collective::ALL.into_iter().filter(|&one| self.has(one)) {
            write!(f, "{between}{one}")?;
            between = ",";
        }
        Ok(())
    }
}

/// Communicators to which the default codec of calls applies: the codec of calls that name none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodecLinks {
    /// All communicators.
    All,
    /// Communicators that span hosts.
    Network,
}

impl CodecLinks {
    /// Returns the choice as a value of `CINCH_CODEC_LINKS`.
    pub const fn name(self) -> &'static str {
        match self {
            CodecLinks::All => "all",
            CodecLinks::Network => "network",
        }
    }
}

/// The effect of a rule on communicators whose names match its pattern.
#[derive(Clone, Debug, PartialEq)]
enum RuleDecision {
    Off,
    Codec {
        codec: CodecSetting,
        min_bytes: Option<usize>,
        collectives: Option<CollectiveSet>,
    },
}

/// A rule on names of communicators.
#[derive(Clone, Debug, PartialEq)]
struct Rule {
    pattern: String,
    verdict: RuleDecision,
}

/// Rules on names of communicators; the first rule whose pattern matches the name applies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CodecRules(Vec<Rule>);

impl CodecRules {
    /// Parses rules `PATTERN=off` or `PATTERN=CODEC[:min=BYTES][:for=COLLECTIVE+...]`, separated by
    /// commas.
    pub(super) fn parse(text: &str) -> Parsed<CodecRules> {
        let mut rules: Vec<Rule> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let rule = Rule::parse(part).map_err(|why| format!("\"{part}\": {why}"))?;
            if let Some(earlier) = rules.iter().find(|earlier| earlier.hides(&rule)) {
                return Err(format!(
                    "\"{part}\" is never reached behind \"{}\"",
                    earlier.pattern
                ));
            }
            rules.push(rule);
        }
        Ok(CodecRules(rules))
    }

    /// Returns the text of the first rule whose codec needs tensor ids, which calls would have to
    /// pass.
    pub(super) fn needing_tensor(&self) -> Option<String> {
        let needs = |rule: &&Rule| match &rule.verdict {
            RuleDecision::Off => false,
            RuleDecision::Codec { codec, .. } => codec.needs_tensor(),
        };
        self.0.iter().find(needs).map(Rule::to_string)
    }

    fn of(&self, name: &str) -> Option<&Rule> {
        self.0.iter().find(|rule| fits(&rule.pattern, name))
    }
}

impl fmt::Display for CodecRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules: Vec<String> = self.0.iter().map(Rule::to_string).collect();
        f.write_str(&rules.join(","))
    }
}

impl Rule {
    fn parse(text: &str) -> Parsed<Rule> {
        let (pattern, decision) = text
            .split_once('=')
            .ok_or("a rule is PATTERN=CODEC or PATTERN=off")?;
        let pattern = pattern.trim();
        if pattern.is_empty() {
            return Err("the pattern is empty; * fits every name".into());
        }
        let decision = decision.trim();
        let verdict = if decision == "off" {
            RuleDecision::Off
        } else {
            let (mut spec, mut min_bytes, mut collectives) = (Vec::new(), None, None);
            for part in decision.split(':').map(str::trim) {
                if let Some(bytes) = part.strip_prefix("min=") {
                    min_bytes = Some(parse_bytes(bytes)?);
                } else if let Some(names) = part.strip_prefix("for=") {
                    collectives = Some(CollectiveSet::parse(names, '+')?);
                } else {
                    spec.push(part);
                }
            }
            RuleDecision::Codec {
                codec: parse_setting(&spec.join(":"))?,
                min_bytes,
                collectives,
            }
        };
        Ok(Rule {
            pattern: pattern.into(),
            verdict,
        })
    }

    /// Returns whether this rule matches every name that the later rule matches, so that the later one never
    /// applies. Detects only `*` and an equal pattern.
    fn hides(&self, later: &Rule) -> bool {
        self.pattern == "*" || self.pattern == later.pattern
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=", self.pattern)?;
        match &self.verdict {
            RuleDecision::Off => f.write_str("off"),
            RuleDecision::Codec {
                codec,
                min_bytes,
                collectives,
            } => {
                write!(f, "{codec}")?;
                if let Some(bytes) = min_bytes {
                    write!(f, ":min={bytes}")?;
                }
                match collectives {
                    Some(set) => write!(f, ":for={}", set.to_string().replace(',', "+")),
                    None => Ok(()),
                }
            }
        }
    }
}

/// Parses the codec of a process or rule. On failure returns the parser's error message.
pub(super) fn parse_setting(text: &str) -> Parsed<CodecSetting> {
    let setting = text.trim().parse();
    setting.map_err(|error: crate::Error| error.message().to_string())
}

/// Parses the codec of a call: one codec, or `off` and `raw` for none.
///
/// # Errors
/// Invalid argument for unknown names and impossible parameters.
pub fn call_codec(text: &str) -> crate::Result<CodecSpec> {
    match text.trim() {
        "off" => Ok(CodecSpec::RAW),
        text => text.parse(),
    }
}

/// Returns whether a pattern matches a name: `*` stands for any text, `?` for one character.
fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    // Holds the positions in pattern and name from which to retry when the text after the last `*`
    // does not match.
    let (mut at, mut seen, mut retry) = (0, 0, None);
    while seen < name.len() {
        match pattern.get(at) {
            Some('*') => {
                retry = Some((at + 1, seen));
                at += 1;
            }
            Some(&one) if one == '?' || one == name[seen] => {
                at += 1;
                seen += 1;
            }
            _ => match retry {
                Some((wildcard, from)) => {
                    retry = Some((wildcard, from + 1));
                    (at, seen) = (wildcard, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|&one| one == '*')
}

/// The policy of a communicator for calls that name no codec.
#[derive(Clone, Debug, PartialEq)]
pub struct CodecPolicy {
    /// Whether compression is off, also for calls that name a codec.
    pub off: bool,
    /// The codec of calls that name none.
    pub codec: CodecSetting,
    /// Calls whose input on a rank has fewer bytes run without a codec.
    pub min_bytes: usize,
    /// The collectives to which the codec applies.
    pub collectives: CollectiveSet,
    /// Number of coded calls from one sample to the next; 0 samples none. A sampled call is also run
    /// exactly on a window.
    pub sample: u32,
    /// Relative error above which a sampled call switches the codec off.
    pub bound: f64,
    /// The setting that chose the codec, for the log.
    pub why: String,
}

impl CodecPolicy {
    /// Returns the policy of a communicator with these settings and name, on one host or on several.
    pub fn new(config: &Config, one_host: bool) -> CodecPolicy {
        let policy = CodecPolicy {
            off: false,
            codec: config.codec,
            min_bytes: config.codec_min_bytes,
            collectives: config.codec_collectives,
            sample: config.codec_sample,
            bound: config.codec_bound,
            why: match config.codec_by_program {
                true => "by the program".into(),
                false if config.codec.is_lossy() => "by CINCH_CODEC".into(),
                false => "no CINCH_CODEC".into(),
            },
        };
        if config.codec_off {
            return policy.without(true, "CINCH_CODEC=off".into());
        }
        match config.codec_rules.of(&config.comm_name) {
            Some(rule) => policy.under(rule, config.codec_by_program),
            None => policy,
        }
        .on(config.codec_links, one_host)
    }

    fn under(self, rule: &Rule, by_program: bool) -> CodecPolicy {
        let why = format!("by the rule {rule} of CINCH_CODEC_RULES");
        match &rule.verdict {
            RuleDecision::Off => self.without(true, why),
            // The program chose the codec of this communicator itself; this choice overrides a rule
            // on names.
            _ if by_program => self,
            RuleDecision::Codec {
                codec,
                min_bytes,
                collectives,
            } => CodecPolicy {
                codec: *codec,
                min_bytes: min_bytes.unwrap_or(self.min_bytes),
                collectives: collectives.unwrap_or(self.collectives),
                why,
                ..self
            },
        }
    }

    fn on(self, links: CodecLinks, one_host: bool) -> CodecPolicy {
        let codec = match one_host {
            true => self.codec.on(1),
            false => self.codec,
        };
        let this = CodecPolicy { codec, ..self };
        if links == CodecLinks::Network && one_host && codec.is_lossy() {
            let why = "all ranks are on one host, and CINCH_CODEC_LINKS=network".into();
            return this.without(false, why);
        }
        this
    }

    fn without(self, off: bool, why: String) -> CodecPolicy {
        CodecPolicy {
            off,
            codec: CodecSetting::RAW,
            why,
            ..self
        }
    }

    /// Returns the effective value of a setting that influences this policy, or `None` for any other setting.
    /// The values must be equal on all ranks, but the rules that produce them may differ.
    pub fn in_effect(&self, name: &str) -> Option<String> {
        Some(match name {
            "CINCH_CODEC" if self.off => "off".into(),
            "CINCH_CODEC" => self.codec.to_string(),
            "CINCH_CODEC_MIN_BYTES" => self.min_bytes.to_string(),
            "CINCH_CODEC_COLLECTIVES" => self.collectives.to_string(),
            "CINCH_CODEC_SAMPLE" => self.sample.to_string(),
            "CINCH_CODEC_BOUND" => self.bound.to_string(),
            _ => return None,
        })
    }
}

impl fmt::Display for CodecPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.codec.is_lossy() {
            return write!(f, "compression off: {}", self.why);
        }
        write!(
            f,
            "{} of {} from {} bytes, {}",
            self.codec, self.collectives, self.min_bytes, self.why
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::Origin;
    use super::*;

    fn config(settings: &[(&str, &str)]) -> Config {
        let mut config = Config::default();
        for (name, value) in settings {
            config.set(name, value, Origin::Environment).unwrap();
        }
        config
    }

    #[test]
    fn pattern_fits_whole_name() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*", "anything", true),
            ("dp*", "dp", true),
            ("dp*", "dp_0", true),
            ("dp*", "tdp", false),
            ("*dp", "tdp", true),
            ("*dp", "dp0", false),
            ("d?", "dp", true),
            ("d?", "d", false),
            ("a*b*c", "aXbXbYc", true),
            ("a*b*c", "aXbXbY", false),
            ("", "", true),
            ("ü?", "üß", true),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }

    /// Each row lists the codecs of process, rules and program, and the communicator's name. The last two
    /// columns are the expected codec, and whether compression is finally off.
    #[test]
    fn narrowest_codec_wins_and_off_is_final() {
        let rules = "dp*=linear8,tp*=off,ep?=raw,*=static8";
        for (process, rules, program, name, codec, off) in [
            (None, None, None, "dp", "raw", false),
            (
                Some("dynamic8"),
                None,
                None,
                "dp",
                "dynamic8:block=256",
                false,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                None,
                "dp0",
                "linear8:block=256",
                false,
            ),
            (Some("dynamic8"), Some(rules), None, "tp0", "raw", true),
            (Some("dynamic8"), Some(rules), None, "ep1", "raw", false),
            (Some("dynamic8"), Some(rules), None, "", "static8", false),
            (None, Some(rules), None, "dp", "linear8:block=256", false),
            (
                None,
                Some("dp=auto:linear8"),
                None,
                "dp",
                "auto:linear8:block=256",
                false,
            ),
            (Some("off"), Some(rules), None, "dp", "raw", true),
            (
                Some("raw"),
                Some(rules),
                None,
                "dp",
                "linear8:block=256",
                false,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                Some("cast16"),
                "dp",
                "cast16",
                false,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                Some("cast16"),
                "tp",
                "raw",
                true,
            ),
            (
                Some("dynamic8"),
                Some(rules),
                Some("off"),
                "dp",
                "raw",
                true,
            ),
            (Some("off"), None, Some("cast16"), "dp", "raw", true),
            (Some("dynamic8"), None, Some("raw"), "dp", "raw", false),
        ] {
            let case = format!("{process:?} {rules:?} {program:?} {name}");
            let mut config = config(&[]);
            let mut set = |knob, value: Option<&str>, origin| {
                value.map(|value| config.set(knob, value, origin).unwrap())
            };
            set("CINCH_CODEC", process, Origin::Environment);
            set("CINCH_CODEC_RULES", rules, Origin::Environment);
            set("CINCH_CODEC", program, Origin::Program);
            config.comm_name = name.into();
            let policy = CodecPolicy::new(&config, true);
            assert_eq!(policy.codec.to_string(), codec, "{case}: {policy}");
            assert_eq!(policy.off, off, "{case}: {policy}");
        }
    }

    #[test]
    fn rule_has_its_own_size_and_collectives() {
        let mut config = config(&[
            ("CINCH_CODEC_MIN_BYTES", "1M"),
            (
                "CINCH_CODEC_RULES",
                "emb=dynamic8:block=64:min=64K:for=all_gather+reduce_scatter",
            ),
        ]);
        config.comm_name = "emb".into();
        let policy = CodecPolicy::new(&config, true);
        assert_eq!(policy.codec.to_string(), "dynamic8:block=64");
        assert_eq!(policy.min_bytes, 64 << 10);
        assert_eq!(policy.collectives.to_string(), "all_gather,reduce_scatter");
        // Printed rules parse to the same rules.
        let text = config.codec_rules.to_string();
        assert_eq!(CodecRules::parse(&text), Ok(config.codec_rules.clone()));
        config.comm_name = "other".into();
        let policy = CodecPolicy::new(&config, true);
        assert_eq!(policy.min_bytes, 1 << 20);
        assert_eq!(policy.to_string(), "compression off: no CINCH_CODEC");
    }

    #[test]
    fn one_host_with_codec_for_network_is_exact() {
        let mut config = config(&[("CINCH_CODEC", "linear8")]);
        assert!(CodecPolicy::new(&config, true).codec.is_lossy());
        config
            .set("CINCH_CODEC_LINKS", "network", Origin::Environment)
            .unwrap();
        let near = CodecPolicy::new(&config, true);
        // The setting turns off only the default codec; `off` stays false, so a call may still name
        // a codec.
        assert!(!near.codec.is_lossy() && !near.off);
        assert!(near.to_string().contains("one host"), "{near}");
        assert!(CodecPolicy::new(&config, false).codec.is_lossy());
    }

    #[test]
    fn misspelt_rule_is_quoted_in_the_error() {
        for (text, reason) in [
            ("dp*", "PATTERN=CODEC"),
            ("=dynamic8", "pattern is empty"),
            ("dp*=dynamic9", "dynamic9"),
            ("dp*=of", "of"),
            ("dp*=dynamic8:blok=64", "blok"),
            ("dp*=dynamic8:min=1X", "byte count"),
            ("dp*=dynamic8:for=allreduce", "allreduce"),
            ("*=dynamic8,dp=off", "never reached"),
            ("dp=dynamic8,dp=off", "never reached"),
            ("dp=dynamic8,", "PATTERN=CODEC"),
            ("", "PATTERN=CODEC"),
        ] {
            let error = CodecRules::parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn codec_of_call_is_parsed() {
        assert_eq!(call_codec(" off ").unwrap(), CodecSpec::RAW);
        assert_eq!(call_codec("raw").unwrap(), CodecSpec::RAW);
        assert_eq!(
            call_codec("linear8:block=64").unwrap().to_string(),
            "linear8:block=64"
        );
        assert!(call_codec("int8").is_err());
        assert!(call_codec("").is_err());
    }
}

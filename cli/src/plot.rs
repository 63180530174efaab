//! Line charts as SVG: panels one above the other over one logarithmic axis, and a legend.

use std::fmt::Write;

/// One line.
pub struct Series {
    /// Name in the legend. Series of one name in both panels share a colour.
    pub name: String,
    /// Dashed instead of solid.
    pub dashed: bool,
    /// Place on the horizontal axis and value; values that the axis cannot show are left out.
    pub points: Vec<(f64, f64)>,
}

/// One chart.
pub struct Panel {
    /// Label of the vertical axis, with its unit.
    pub label: String,
    /// Logarithmic vertical axis.
    pub logarithmic: bool,
    /// Lines.
    pub series: Vec<Series>,
}

const WIDTH: f64 = 860.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 64.0;
const PANEL: f64 = 240.0;
const GAP: f64 = 64.0;
const LEGEND_ROW: f64 = 20.0;

/// Told apart by people who do not see all colours (P. Tol's bright scheme).
const COLORS: [&str; 7] = [
    "#4477aa", "#ee6677", "#228833", "#aa3377", "#66a0cc", "#b8860b", "#777777",
];

/// The whole drawing over message size.
pub fn svg(title: &str, subtitle: &str, panels: &[Panel]) -> String {
    svg_over("message size (bytes)", title, subtitle, panels)
}

/// The whole drawing; `across` labels the horizontal axis.
pub fn svg_over(across: &str, title: &str, subtitle: &str, panels: &[Panel]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for series in panels.iter().flat_map(|panel| &panel.series) {
        if !names.contains(&series.name.as_str()) {
            names.push(&series.name);
        }
    }
    let legend = names.len().div_ceil(2) as f64 * LEGEND_ROW;
    let height = TOP + panels.len() as f64 * (PANEL + GAP) + legend + 12.0;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\">\n\
         <title>{}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>",
        escape(title)
    );
    text(&mut out, (LEFT, 28.0), "start", 18.0, "#111111", title);
    text(&mut out, (LEFT, 48.0), "start", 12.0, "#555555", subtitle);
    let sizes = || {
        let points = panels.iter().flat_map(|panel| &panel.series);
        points.flat_map(|series| series.points.iter().map(|point| point.0.max(1.0)))
    };
    let x = Axis::powers_of_two(sizes());
    for (index, panel) in panels.iter().enumerate() {
        let top = TOP + index as f64 * (PANEL + GAP);
        draw_panel(&mut out, panel, (&x, across), top, &names);
    }
    let legend_top = TOP + panels.len() as f64 * (PANEL + GAP);
    for (index, name) in names.iter().enumerate() {
        let left = LEFT + (index % 2) as f64 * (WIDTH - LEFT - RIGHT) / 2.0;
        let middle = legend_top + (index / 2) as f64 * LEGEND_ROW;
        let dashed = panels
            .iter()
            .flat_map(|panel| &panel.series)
            .any(|series| series.name == *name && series.dashed);
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{middle}\" x2=\"{}\" y2=\"{middle}\" stroke=\"{}\" \
             stroke-width=\"2\"{}/>",
            left + 28.0,
            color(index),
            dash(dashed)
        );
        text(
            &mut out,
            (left + 36.0, middle + 4.0),
            "start",
            12.0,
            "#222222",
            name,
        );
    }
    out.push_str("</svg>\n");
    out
}

fn draw_panel(
    out: &mut String,
    panel: &Panel,
    (x, across): (&Axis, &str),
    top: f64,
    names: &[&str],
) {
    let (right, bottom) = (WIDTH - RIGHT, top + PANEL);
    let shown = |value: f64| value.is_finite() && (!panel.logarithmic || value > 0.0);
    let values = || {
        let points = panel.series.iter().flat_map(|series| &series.points);
        points.map(|point| point.1).filter(|&value| shown(value))
    };
    let y = match panel.logarithmic {
        true => Axis::powers_of_ten(values()),
        false => Axis::from_zero(values()),
    };
    let at_x = |size: f64| LEFT + x.place(size.max(1.0)) * (right - LEFT);
    let at_y = |value: f64| bottom - y.place(value) * PANEL;
    for (value, label) in &y.ticks {
        let height = at_y(*value);
        line(out, (LEFT, height), (right, height), "#e3e3e3");
        text(
            out,
            (LEFT - 8.0, height + 4.0),
            "end",
            11.0,
            "#444444",
            label,
        );
    }
    for (size, label) in &x.ticks {
        let at = at_x(*size);
        line(out, (at, top), (at, bottom), "#efefef");
        text(out, (at, bottom + 16.0), "middle", 11.0, "#444444", label);
    }
    line(out, (LEFT, bottom), (right, bottom), "#333333");
    line(out, (LEFT, top), (LEFT, bottom), "#333333");
    let centre = (LEFT + right) / 2.0;
    text(
        out,
        (centre, bottom + 34.0),
        "middle",
        12.0,
        "#222222",
        across,
    );
    let middle = top + PANEL / 2.0;
    let _ = writeln!(
        out,
        "<text transform=\"translate(22 {middle:.1}) rotate(-90)\" text-anchor=\"middle\" \
         font-size=\"12\" fill=\"#222222\">{}</text>",
        escape(&panel.label)
    );
    for series in &panel.series {
        let index = names.iter().position(|name| *name == series.name);
        let color = color(index.unwrap_or(0));
        let points: Vec<(f64, f64)> = series
            .points
            .iter()
            .filter(|point| shown(point.1))
            .map(|point| (at_x(point.0), at_y(point.1)))
            .collect();
        let path: Vec<String> = points
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{}/>",
            path.join(" "),
            dash(series.dashed)
        );
        for (x, y) in points {
            let fill = if series.dashed { "#ffffff" } else { color };
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{fill}\" stroke=\"{color}\"/>"
            );
        }
    }
}

/// Maps values to 0..1 along an axis.
struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        match self.logarithmic {
            true => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
            false => (value - self.low) / (self.high - self.low),
        }
    }

    fn logarithmic(
        values: impl Iterator<Item = f64>,
        base: f64,
        most: i32,
        label: impl Fn(i32) -> String,
    ) -> Axis {
        let (low, high) = values.fold((f64::INFINITY, 0f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let (low, high) = if low <= high {
            (low, high)
        } else {
            (1.0, base)
        };
        let exponent = |value: f64| value.ln() / base.ln();
        let first = (exponent(low) + 1e-9).floor() as i32;
        let last = ((exponent(high) - 1e-9).ceil() as i32).max(first + 1);
        let step = ((last - first + most - 1) / most).max(1);
        Axis {
            low: base.powi(first),
            high: base.powi(last),
            logarithmic: true,
            ticks: (first..=last)
                .step_by(step as usize)
                .map(|exponent| (base.powi(exponent), label(exponent)))
                .collect(),
        }
    }

    fn powers_of_two(sizes: impl Iterator<Item = f64>) -> Axis {
        Axis::logarithmic(sizes, 2.0, 13, |exponent| {
            let exponent = exponent.max(0) as u32;
            let unit = ["", "K", "M", "G", "T"][(exponent / 10).min(4) as usize];
            format!("{}{unit}", 1u64 << (exponent % 10))
        })
    }

    fn powers_of_ten(values: impl Iterator<Item = f64>) -> Axis {
        Axis::logarithmic(values, 10.0, 7, |exponent| match exponent {
            -2..=4 => format!("{}", 10f64.powi(exponent)),
            _ => format!("1e{exponent}"),
        })
    }

    /// Linear from 0, with ticks at 1, 2 or 5 times a power of ten.
    fn from_zero(values: impl Iterator<Item = f64>) -> Axis {
        let high = match values.fold(0f64, f64::max) {
            high if high > 0.0 => high,
            _ => 1.0,
        };
        let power = 10f64.powf((high / 5.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|digit| digit * power)
            .find(|step| high / step <= 6.0)
            .unwrap_or(10.0 * power);
        let steps = (high / step).ceil().max(1.0);
        let digits = (-(step.log10() + 1e-9).floor()).max(0.0) as usize;
        Axis {
            low: 0.0,
            high: steps * step,
            logarithmic: false,
            ticks: (0..=steps as usize)
                .map(|k| (k as f64 * step, format!("{:.digits$}", k as f64 * step)))
                .collect(),
        }
    }
}

fn color(index: usize) -> &'static str {
    COLORS[index % COLORS.len()]
}

fn dash(dashed: bool) -> &'static str {
    if dashed {
        " stroke-dasharray=\"6 4\""
    } else {
        ""
    }
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), color: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{color}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(out: &mut String, at: (f64, f64), anchor: &str, size: f64, color: &str, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" \
         fill=\"{color}\">{}</text>",
        at.0,
        at.1,
        escape(text)
    );
}

/// Text as XML has it; control characters, which XML 1.0 cannot hold, become spaces.
/// Text as it stands in SVG and HTML.
pub fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(logarithmic: bool, values: &[f64]) -> Panel {
        Panel {
            label: "a < b & \"c\"".into(),
            logarithmic,
            series: [false, true]
                .into_iter()
                .map(|dashed| Series {
                    name: format!("f32 <sum> {dashed}"),
                    dashed,
                    points: values
                        .iter()
                        .enumerate()
                        .map(|(i, &value)| (1024.0 * 2f64.powi(i as i32), value))
                        .collect(),
                })
                .collect(),
        }
    }

    /// A checker for the XML that we write: tags nest, attributes are quoted, text is escaped.
    /// Returns how often each element occurs.
    fn check_xml(text: &str) -> std::collections::HashMap<String, usize> {
        let (mut open, mut seen) = (Vec::new(), std::collections::HashMap::new());
        let mut rest = text.trim_end();
        while let Some((before, tag)) = rest.split_once('<') {
            assert!(!before.contains('>'), "stray > in {before:?}");
            for (at, _) in before.match_indices('&') {
                let entity = before[at + 1..].split(';').next().unwrap();
                assert!(["amp", "lt", "gt", "quot"].contains(&entity), "&{entity}");
            }
            let (tag, after) = tag.split_once('>').expect("an open tag");
            rest = after;
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.split([' ', '/']).next().unwrap().to_string();
            *seen.entry(name.clone()).or_default() += 1;
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert!(open.is_empty() && rest.is_empty(), "{open:?} {rest:?}");
        assert!(!text.contains("NaN") && !text.contains("inf"));
        seen
    }

    #[test]
    fn drawings_are_well_formed() {
        let panels = [
            panel(false, &[0.5, 1.0, 3.7]),
            panel(true, &[1e-3, 2e-2, 0.0]),
        ];
        let drawing = svg("4 ranks & <more>", "\u{1b}[0m \"here\"", &panels);
        let seen = check_xml(&drawing);
        assert_eq!(seen["polyline"], 4);
        // The logarithmic panel cannot show its zero.
        assert_eq!(seen["circle"], 2 * 3 + 2 * 2);
        assert!(drawing.contains("message size (bytes)"));
    }

    #[test]
    fn odd_values_do_not_break_a_drawing() {
        for values in [
            &[][..],
            &[0.0],
            &[1.0],
            &[f64::NAN, f64::INFINITY, -1.0],
            &[1e-300, 1e300],
        ] {
            check_xml(&svg("", "", &[panel(false, values), panel(true, values)]));
        }
        check_xml(&svg("", "", &[]));
    }

    #[test]
    fn axes_cover_their_values() {
        let axis = Axis::powers_of_two([1024.0, 1e6].into_iter());
        assert_eq!((axis.low, axis.high), (1024.0, 1048576.0));
        assert_eq!(axis.ticks[0].1, "1K");
        assert_eq!(axis.ticks.last().unwrap().1, "1M");
        let axis = Axis::from_zero([0.3, 4.1].into_iter());
        assert_eq!((axis.low, axis.high), (0.0, 5.0));
        let axis = Axis::powers_of_ten([3e-4, 0.2].into_iter());
        assert!((axis.low / 1e-4 - 1.0).abs() < 1e-9 && (axis.high - 1.0).abs() < 1e-9);
    }
}

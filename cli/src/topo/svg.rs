//! A drawing of a machine: sockets, switches, GPUs and NICs with the bandwidths of their links, the groups by
//! colour, and the best rings or the rails between groups.

use super::Shown;
use super::text::{devs, gb_s};
use cinch::topology::{LinkKind, MachineGraph, NodeId, NodeKind};
use std::fmt::Write;

/// The "bright" colours of Paul Tol, which colour-blind readers can tell apart.
const COLORS: [&str; 7] = [
    "#4477aa", "#ee6677", "#228833", "#aa3377", "#66a0cc", "#b8860b", "#777777",
];

/// Width of the column of a GPU or NIC.
const COLUMN: f64 = 92.0;
/// Height of a level of the tree.
const LEVEL: f64 = 84.0;
const TOP: f64 = 96.0;
const MARGIN: f64 = 24.0;
/// Largest number of rings that are drawn. Further rings would hide each other.
const DRAWN_RINGS: usize = 4;

/// Returns the machine as an SVG image.
pub fn draw(shown: &Shown) -> String {
    let mut drawing = Drawing::new(shown);
    drawing.sockets();
    drawing.tree();
    drawing.nvlinks();
    let height = drawing.schedule();
    drawing.finish(height)
}

struct Drawing<'a> {
    shown: &'a Shown,
    graph: &'a MachineGraph,
    /// Centre of each node.
    places: Vec<(f64, f64)>,
    width: f64,
    /// Vertical position of GPUs and NICs.
    leaves: f64,
    body: String,
}

impl<'a> Drawing<'a> {
    fn new(shown: &'a Shown) -> Drawing<'a> {
        let graph = &shown.graph;
        let depth = |node: NodeId| graph.ancestors(node).count() - 1;
        let deepest = (0..graph.nodes.len()).map(depth).max().unwrap_or(1).max(1);
        let mut drawing = Drawing {
            shown,
            graph,
            places: vec![(0.0, 0.0); graph.nodes.len()],
            width: MARGIN,
            leaves: TOP + LEVEL * deepest as f64,
            body: String::new(),
        };
        for node in 0..graph.nodes.len() {
            if graph.nodes[node].kind == NodeKind::Socket {
                drawing.place(node, 0);
                drawing.width += MARGIN;
            }
        }
        drawing.width = drawing.width.max(640.0);
        drawing
    }

    fn children(&self, node: NodeId) -> Vec<NodeId> {
        (0..self.graph.nodes.len())
            .filter(|&n| self.graph.nodes[n].parent == Some(node))
            .collect()
    }

    /// Places a node above the middle of the nodes below it. Readers of descriptions limit the depth, so the
    /// recursion is bounded.
    fn place(&mut self, node: NodeId, depth: usize) {
        let children = self.children(node);
        let begin = self.width;
        for &child in &children {
            self.place(child, depth + 1);
        }
        let is_leaf = matches!(
            self.graph.nodes[node].kind,
            NodeKind::Gpu(_) | NodeKind::Nic(_)
        );
        if children.is_empty() {
            self.width += COLUMN;
        }
        let y = if is_leaf {
            self.leaves
        } else {
            TOP + LEVEL * depth as f64
        };
        self.places[node] = (f64::midpoint(begin, self.width), y);
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), color: &str, width: f64) {
        let ((x1, y1), (x2, y2)) = (from, to);
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.body,
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{color}" stroke-width="{width}"/>"#
        );
    }

    fn text(&mut self, (x, y): (f64, f64), size: u32, anchor: &str, color: &str, text: &str) {
        let text = escape(text);
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{text}</text>"#
        );
    }

    fn label(&mut self, at: (f64, f64), text: &str) {
        let (x, y) = at;
        let width = 6.2 * text.len() as f64 + 4.0;
        let _ = writeln!(
            self.body,
            r#"<rect x="{:.1}" y="{:.1}" width="{width:.1}" height="13" fill="white" fill-opacity="0.85"/>"#,
            x - width / 2.0,
            y - 10.0
        );
        self.text((x, y), 10, "middle", "#333", text);
    }

    fn rounded(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        fill: &str,
        dashed: bool,
    ) {
        let dash = if dashed {
            r#" stroke-dasharray="4 3""#
        } else {
            ""
        };
        let _ = writeln!(
            self.body,
            r##"<rect x="{:.1}" y="{:.1}" width="{width:.1}" height="{height:.1}" rx="6" fill="{fill}" stroke="#444"{dash}/>"##,
            x - width / 2.0,
            y - height / 2.0
        );
    }

    /// Draws the links between sockets, as arcs above them.
    fn sockets(&mut self) {
        let links: Vec<_> = self.graph.links.iter().step_by(2).copied().collect();
        for link in links
            .into_iter()
            .filter(|link| link.class == LinkKind::Socket)
        {
            let [(x1, y), (x2, _)] = [self.places[link.from], self.places[link.to]];
            let (y, middle) = (y - 18.0, f64::midpoint(x1, x2));
            let rise = 12.0 + (x2 - x1).abs() / 40.0;
            let _ = writeln!(
                self.body,
                r##"<path d="M{x1:.1} {y:.1} Q{middle:.1} {:.1} {x2:.1} {y:.1}" fill="none" stroke="#777" stroke-width="2"/>"##,
                y - 2.0 * rise
            );
            self.label((middle, y - rise + 4.0), &gb_s(link.bandwidth));
        }
    }

    /// Draws PCIe links with their bandwidths, and all nodes.
    fn tree(&mut self) {
        let links: Vec<_> = self.graph.links.iter().step_by(2).copied().collect();
        for link in links {
            if matches!(link.class, LinkKind::Pcie | LinkKind::Network) {
                let (from, to) = (self.places[link.from], self.places[link.to]);
                self.line(from, to, "#999", 1.5);
                let middle = (from.0 * 0.7 + to.0 * 0.3, from.1 * 0.7 + to.1 * 0.3 + 4.0);
                self.label(middle, &gb_s(link.bandwidth));
            }
        }
        for node in 0..self.graph.nodes.len() {
            self.node(node);
        }
    }

    fn node(&mut self, node: NodeId) {
        let at @ (x, y) = self.places[node];
        let name = self.graph.nodes[node].name.clone();
        match self.graph.nodes[node].kind {
            NodeKind::Socket => {
                self.rounded(at, (110.0, 34.0), "#eef0f4", false);
                self.text((x, y + 5.0), 13, "middle", "#222", &name);
            }
            NodeKind::Switch => {
                self.rounded(at, (84.0, 28.0), "#f7f3e8", false);
                self.text((x, y - 1.0), 11, "middle", "#222", "switch");
                self.text((x, y + 10.0), 9, "middle", "#555", &name);
            }
            NodeKind::Gpu(index) => {
                let groups = &self.shown.prediction.groups;
                let group = groups
                    .iter()
                    .position(|group| group.contains(&index))
                    .unwrap_or(0);
                self.rounded(at, (80.0, 38.0), COLORS[group % COLORS.len()], false);
                let gpu = self.graph.gpus[index];
                let rank = gpu.rank.filter(|rank| *rank != gpu.dev);
                let rank = rank.map_or(String::new(), |rank| format!(" rank {rank}"));
                self.text(
                    (x, y - 2.0),
                    12,
                    "middle",
                    "white",
                    &format!("GPU {}{rank}", gpu.dev),
                );
                self.text((x, y + 12.0), 9, "middle", "white", &name);
            }
            NodeKind::Nic(_) => {
                self.rounded(at, (80.0, 30.0), "white", true);
                self.text((x, y + 4.0), 10, "middle", "#222", &name);
            }
            NodeKind::LinkSwitch => {}
        }
    }

    /// Draws NVLinks: a bar below all GPUs for a link switch, else an arc for each pair.
    fn nvlinks(&mut self) {
        let links: Vec<_> = self.graph.links.iter().step_by(2).copied().collect();
        let links = links
            .into_iter()
            .filter(|link| link.class == LinkKind::NvLink);
        for link in links {
            let ends = [link.from, link.to];
            let is_switch = |node: &NodeId| self.graph.nodes[*node].kind == NodeKind::LinkSwitch;
            if ends.iter().any(is_switch) {
                let gpu = if is_switch(&link.from) {
                    link.to
                } else {
                    link.from
                };
                let (x, y) = self.places[gpu];
                self.line((x, y + 19.0), (x, y + 48.0), "#6a9a3a", 3.0);
                self.label((x, y + 38.0), &gb_s(link.bandwidth));
                continue;
            }
            let mut xs = ends.map(|node| self.places[node].0);
            xs.sort_by(f64::total_cmp);
            let [x1, x2] = xs;
            let y = self.leaves + 19.0;
            let drop = 10.0 + (x2 - x1) / 9.0;
            let middle = f64::midpoint(x1, x2);
            let _ = writeln!(
                self.body,
                r##"<path d="M{x1:.1} {y:.1} Q{middle:.1} {:.1} {x2:.1} {y:.1}" fill="none" stroke="#6a9a3a" stroke-width="1.5"/>"##,
                y + 2.0 * drop
            );
            self.label((middle, y + drop + 3.0), &gb_s(link.bandwidth));
        }
        let switches = self
            .graph
            .nodes
            .iter()
            .any(|node| node.kind == NodeKind::LinkSwitch);
        if switches {
            let y = self.leaves + 56.0;
            let (x, width) = (self.width / 2.0, self.width - 2.0 * MARGIN);
            self.rounded((x, y), (width, 18.0), "#e4efda", false);
            self.text((x, y + 4.0), 11, "middle", "#222", "link switch");
        }
    }

    /// Draws the best rings below the machine, a row each, and lists the groups. Returns the height.
    fn schedule(&mut self) -> f64 {
        let spans = self
            .graph
            .links
            .iter()
            .filter(|link| link.class == LinkKind::NvLink);
        let widest = spans
            .map(|link| (self.places[link.from].0 - self.places[link.to].0).abs())
            .fold(0.0, f64::max);
        let y = self.leaves + 90.0 + widest / 9.0;
        let mut y = match self.best_groups() {
            Some(groups) => self.rails(y, &groups),
            None => self.rings(y),
        };
        for (name, ms) in self.shown.predicted_ms() {
            let line = format!("{}: {ms:.2} ms", name.replace('_', " "));
            self.text((MARGIN, y), 11, "start", "#333", &line);
            y += 15.0;
        }
        y
    }

    /// Returns the innermost groups of the best schedule on groups, if it beats all rings.
    fn best_groups(&self) -> Option<Vec<Vec<usize>>> {
        let prediction = &self.shown.prediction;
        let best = prediction.hierarchy.as_ref()?;
        (best.time < prediction.ring_set.time).then(|| best.partitions[0].groups.clone())
    }

    /// Draws the GPUs of each rail as connected points. Returns the vertical position below.
    fn rails(&mut self, y: f64, groups: &[Vec<usize>]) -> f64 {
        let hierarchy = self.shown.prediction.hierarchy.as_ref();
        let title = hierarchy.map_or(String::new(), |best| {
            format!("rails between groups; {}", super::text::levels(best))
        });
        self.text((MARGIN, y - 14.0), 11, "start", "#333", &title);
        let rails = groups.iter().map(Vec::len).max().unwrap_or(0);
        for rail in 0..rails {
            let rail_gpus: Vec<usize> = groups
                .iter()
                .map(|group| group[rail % group.len()])
                .collect();
            self.arcs(
                y + 14.0 * rail as f64,
                &rail_gpus,
                COLORS[rail % COLORS.len()],
            );
        }
        y + 14.0 * rails as f64 + 30.0 + self.width / 16.0
    }

    /// Draws the rings with the largest shares. Returns the vertical position below.
    fn rings(&mut self, mut y: f64) -> f64 {
        let rings = self.shown.prediction.ring_set.rings.clone();
        let whole: u64 = rings.iter().map(|(_, share)| share).sum();
        for (number, (ring, share)) in rings.iter().take(DRAWN_RINGS).enumerate() {
            let color = COLORS[number % COLORS.len()];
            let percent = 100.0 * *share as f64 / whole as f64;
            let title = format!(
                "ring {} ({percent:.0} %): {}",
                number + 1,
                devs(self.graph, ring)
            );
            self.text((MARGIN, y - 14.0), 11, "start", color, &title);
            let closed: Vec<usize> = ring.iter().chain(ring.first()).copied().collect();
            self.arcs(y, &closed, color);
            y += 50.0 + self.width / 16.0;
        }
        let more = rings.len().saturating_sub(DRAWN_RINGS);
        if more > 0 {
            self.text(
                (MARGIN, y - 14.0),
                11,
                "start",
                "#333",
                &format!("{more} more rings"),
            );
            y += 20.0;
        }
        y
    }

    /// Draws a point below each GPU of `gpus`, and an arc from each to the next.
    fn arcs(&mut self, y: f64, gpus: &[usize], color: &str) {
        let xs: Vec<f64> = gpus
            .iter()
            .map(|&gpu| self.places[self.graph.gpus[gpu].node].0)
            .collect();
        for pair in xs.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let rise = 6.0 + (to - from).abs() / 16.0;
            let _ = writeln!(
                self.body,
                r##"<path d="M{from:.1} {y:.1} Q{:.1} {:.1} {to:.1} {y:.1}" fill="none" stroke="{color}" stroke-width="2"/>"##,
                f64::midpoint(from, to),
                y + 2.0 * rise
            );
        }
        for x in xs {
            let _ = writeln!(
                self.body,
                r##"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{color}"/>"##
            );
        }
    }

    fn finish(self, height: f64) -> String {
        let width = self.width;
        let title = escape(&self.shown.source);
        let (gpus, bytes) = (self.graph.gpus.len(), self.shown.bytes);
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" viewBox="0 0 {width:.0} {height:.0}" font-family="sans-serif">
<rect width="100%" height="100%" fill="white"/>
<text x="{MARGIN}" y="24" font-size="15" fill="#111">{title}</text>
<text x="{MARGIN}" y="42" font-size="11" fill="#555">{gpus} GPUs; GB/s each way, * assumed; groups by colour; predictions for {bytes} bytes</text>
{}</svg>
"##,
            self.body
        )
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

//! What a domain's metadata says of its devices beyond what libvirt's own elements say.
//!
//! ```xml
//! <metadata>
//!   <wadi:instance xmlns:wadi='urn:wadi:domain:1' name='vm1' type='small' priority='300'>
//!     <wadi:nic device='net0' mtu='1500' reserve-mbps='2000' vlan='7'>
//!       <wadi:transmit bytes-per-second='125000000'/>
//!       <wadi:address>10.0.0.2</wadi:address>
//!     </wadi:nic>
//!     <wadi:mchannel weight='3' tenant='red' path='port1,pool'/>
//!   </wadi:instance>
//! </metadata>
//! ```

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::str::FromStr;

use pod_api::client::Client;
use pod_api::{DEFAULT_TENANT, Instance, Mchannel, MchannelSpec, NicLimit, NicPolicy, NicRequest};
use pod_protocol::objects::Priority;
use roxmltree::Node;

use crate::VmmError;
use crate::xml::{Xml, text};

/// The namespace of our element. A domain without one has nothing to do with the pod.
pub const NAMESPACE: &str = "urn:wadi:domain:1";

/// What the element `<wadi:instance>` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// The instance, where it is not named as the domain is.
    pub(super) instance: Option<String>,
    pub(super) instance_type: Option<String>,
    pub(super) vmm_listens: bool,
    /// Where it is not what follows from the type, or the usual one.
    pub(super) priority: Option<u16>,
    /// Without MAC addresses and numbers of queues: the domain's interfaces have these.
    pub(super) nics: Vec<NicRequest>,
    /// Its share of the fabric; without one nothing is measured or held back.
    pub(super) mchannel: Option<MchannelSpec>,
}

impl Metadata {
    /// What makes an instance like this one, with the share of the fabric that the controller says it has.
    pub fn ask(client: &Client, instance: &Instance) -> Result<Self, VmmError> {
        match client.mchannel(&instance.name) {
            Ok(shared) => Ok(Self::of(instance, Some(shared))),
            Err(error) if error.status() == Some(404) => Ok(Self::of(instance, None)),
            Err(error) => Err(error.into()),
        }
    }

    fn of(instance: &Instance, share: Option<Mchannel>) -> Self {
        let nics = instance.nics.iter().filter(|nic| !nic.leaving).map(|nic| NicRequest {
            device: Some(nic.device.clone()),
            mac: None,
            mtu: Some(nic.mtu),
            queue_pairs: None,
            policy: nic.policy.clone(),
            reserved_mbps: nic.reserved_mbps,
            apart: nic.apart.clone(),
            together: nic.together.clone(),
            rails: u8::try_from(nic.rails.len()).ok().filter(|rails| *rails > 0),
        });
        Self {
            instance: Some(instance.name.clone()),
            instance_type: instance.instance_type.clone(),
            vmm_listens: instance.vmm_listens,
            // A type may say another one.
            priority: Some(instance.priority)
                .filter(|it| *it != Priority::DEFAULT.get() || instance.instance_type.is_some()),
            nics: nics.collect(),
            mchannel: share.map(|Mchannel { weight, tenant, path, .. }| MchannelSpec {
                weight,
                tenant,
                path,
            }),
        }
    }

    /// Writes a domain's `<metadata>`.
    pub(crate) fn write(&self, xml: &mut Xml) {
        let mut element = Element::new("instance");
        element.word("xmlns:wadi", Some(NAMESPACE));
        element.word("name", self.instance.as_deref());
        element.word("type", self.instance_type.as_deref());
        element.word("vmm-listens", self.vmm_listens.then_some("yes"));
        element.number("priority", self.priority);
        xml.open("<metadata>");
        xml.open(&element.begun());
        for nic in &self.nics {
            write_nic(nic, xml);
        }
        if let Some(share) = &self.mchannel {
            let mut element = Element::new("mchannel");
            element.number("weight", Some(share.weight));
            element.word("tenant", Some(share.tenant.as_str()).filter(|tenant| *tenant != DEFAULT_TENANT));
            element.word("path", Some(&share.path.join(",")));
            xml.line(&element.whole());
        }
        xml.close("</wadi:instance>");
        xml.close("</metadata>");
    }

    /// Reads the element `<wadi:instance>`. What is not understood is refused: it would never take effect.
    pub(super) fn read(node: Node<'_, '_>) -> Result<Self, String> {
        let attributes = Attributes::of(node, &["name", "type", "vmm-listens", "priority"])?;
        let (mut nics, mut mchannel) = (Vec::new(), None);
        for child in children(node)? {
            match child.tag_name().name() {
                "nic" => nics.push(read_nic(child)?),
                "mchannel" if mchannel.is_some() => {
                    return Err(
                        "an instance has one share of the fabric, and this is a second <wadi:mchannel>"
                            .to_owned(),
                    );
                }
                "mchannel" => mchannel = Some(read_mchannel(child)?),
                other => {
                    return Err(format!(
                        "<wadi:instance> has no element <wadi:{other}>: only <wadi:nic> and <wadi:mchannel>"
                    ));
                }
            }
        }
        Ok(Self {
            instance: attributes.word("name"),
            instance_type: attributes.word("type"),
            vmm_listens: match attributes.word("vmm-listens").as_deref() {
                None | Some("no") => false,
                Some("yes") => true,
                Some(other) => return Err(format!("vmm-listens='{other}' is neither yes nor no")),
            },
            priority: attributes.number("priority")?,
            nics,
            mchannel,
        })
    }
}

/// As the controller takes them.
const WEIGHTS: RangeInclusive<u32> = 1..=1000;

fn read_mchannel(node: Node<'_, '_>) -> Result<MchannelSpec, String> {
    let attributes = Attributes::of(node, &["weight", "tenant", "path"])?;
    if let Some(inside) = children(node)?.first() {
        return Err(format!("<wadi:mchannel> has no elements: take <wadi:{}> out", inside.tag_name().name()));
    }
    let weight = attributes.number("weight")?.unwrap_or(1);
    if !WEIGHTS.contains(&weight) {
        return Err(format!(
            "weight='{weight}' of <wadi:mchannel> is not from {} to {}",
            WEIGHTS.start(),
            WEIGHTS.end()
        ));
    }
    let tenant = attributes.word("tenant").unwrap_or_else(|| DEFAULT_TENANT.to_owned());
    if tenant.is_empty() {
        return Err("tenant='' of <wadi:mchannel> is nobody: leave it out".to_owned());
    }
    let path = attributes.word("path").ok_or("a <wadi:mchannel> needs a path, such as path='port1,pool'")?;
    let path: Vec<String> = path.split(',').map(|element| element.trim().to_owned()).collect();
    let each_once = path.iter().collect::<BTreeSet<_>>().len() == path.len();
    if !each_once || path.iter().any(String::is_empty) {
        return Err(format!(
            "path='{}' of <wadi:mchannel> must name elements of the fabric, each once, with commas between them",
            path.join(",")
        ));
    }
    Ok(MchannelSpec { weight, tenant, path })
}

const NIC: &[&str] = &["device", "mtu", "reserve-mbps", "apart", "together", "rails", "vlan"];
const LIMIT: &[&str] = &["bytes-per-second", "packets-per-second", "burst-ms", "minimum-bytes-per-second"];

fn write_nic(nic: &NicRequest, xml: &mut Xml) {
    let mut element = Element::new("nic");
    element.word("device", nic.device.as_deref());
    element.number("mtu", nic.mtu);
    element.number("reserve-mbps", Some(nic.reserved_mbps).filter(|mbps| *mbps > 0));
    element.word("apart", nic.apart.as_deref());
    element.word("together", nic.together.as_deref());
    element.number("rails", nic.rails);
    element.number("vlan", nic.policy.vlan);
    let limits = [("transmit", nic.policy.transmit), ("receive", nic.policy.receive)];
    let limits: Vec<_> = limits.into_iter().filter(|(_, limit)| *limit != NicLimit::default()).collect();
    if limits.is_empty() && nic.policy.addresses.is_empty() {
        return xml.line(&element.whole());
    }
    xml.open(&element.begun());
    for (direction, limit) in limits {
        let mut element = Element::new(direction);
        element.number("bytes-per-second", limit.bytes_per_second);
        element.number("packets-per-second", limit.packets_per_second);
        element.number("burst-ms", Some(limit.burst_ms));
        element.number("minimum-bytes-per-second", limit.minimum_bytes_per_second);
        xml.line(&element.whole());
    }
    for address in &nic.policy.addresses {
        xml.line(&format!("<wadi:address>{address}</wadi:address>"));
    }
    xml.close("</wadi:nic>");
}

fn read_nic(node: Node<'_, '_>) -> Result<NicRequest, String> {
    let attributes = Attributes::of(node, NIC)?;
    let mut policy = NicPolicy { vlan: attributes.number("vlan")?, ..NicPolicy::default() };
    for child in children(node)? {
        match child.tag_name().name() {
            "transmit" => policy.transmit = read_limit(child)?,
            "receive" => policy.receive = read_limit(child)?,
            "address" => {
                let address = child.text().unwrap_or_default().trim();
                let parsed =
                    address.parse().map_err(|_| format!("{address:?} is no IPv4 or IPv6 address"))?;
                policy.addresses.push(parsed);
            }
            other => {
                return Err(format!(
                    "<wadi:nic> has no element <wadi:{other}>: only <wadi:transmit>, <wadi:receive>, <wadi:address>"
                ));
            }
        }
    }
    let device = attributes.word("device").ok_or("a <wadi:nic> needs a device, such as device='net0'")?;
    Ok(NicRequest {
        device: Some(device),
        mac: None,
        mtu: attributes.number("mtu")?,
        queue_pairs: None,
        policy,
        reserved_mbps: attributes.number("reserve-mbps")?.unwrap_or(0),
        apart: attributes.word("apart"),
        together: attributes.word("together"),
        rails: attributes.number("rails")?,
    })
}

fn read_limit(node: Node<'_, '_>) -> Result<NicLimit, String> {
    let attributes = Attributes::of(node, LIMIT)?;
    Ok(NicLimit {
        bytes_per_second: attributes.number("bytes-per-second")?,
        packets_per_second: attributes.number("packets-per-second")?,
        burst_ms: attributes.number("burst-ms")?.unwrap_or(NicLimit::default().burst_ms),
        minimum_bytes_per_second: attributes.number("minimum-bytes-per-second")?,
    })
}

/// The elements in an element of ours, which must be ours too.
fn children<'a, 'input>(node: Node<'a, 'input>) -> Result<Vec<Node<'a, 'input>>, String> {
    let elements: Vec<_> = node.children().filter(Node::is_element).collect();
    match elements.iter().find(|it| it.tag_name().namespace() != Some(NAMESPACE)) {
        Some(foreign) => Err(format!(
            "<{}> in <wadi:{}> is not of the namespace {NAMESPACE}: write <wadi:{0}>",
            foreign.tag_name().name(),
            node.tag_name().name()
        )),
        None => Ok(elements),
    }
}

/// The attributes of an element, all of which are known.
struct Attributes<'a, 'input>(Node<'a, 'input>);

impl<'a, 'input> Attributes<'a, 'input> {
    fn of(node: Node<'a, 'input>, known: &[&str]) -> Result<Self, String> {
        match node.attributes().find(|it| !known.contains(&it.name())) {
            Some(unknown) => Err(format!(
                "<wadi:{}> has no attribute {}: it may have {}",
                node.tag_name().name(),
                unknown.name(),
                known.join(", ")
            )),
            None => Ok(Self(node)),
        }
    }

    fn word(&self, name: &str) -> Option<String> {
        self.0.attribute(name).map(str::to_owned)
    }

    fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>, String> {
        let Some(value) = self.0.attribute(name) else { return Ok(None) };
        let element = self.0.tag_name().name();
        let refuse = |_| format!("{name}='{value}' of <wadi:{element}> is no number, or too large");
        value.parse().map(Some).map_err(refuse)
    }
}

/// A tag that is put together.
struct Element(String);

impl Element {
    fn new(name: &str) -> Self {
        Self(format!("<wadi:{name}"))
    }

    fn word(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            // Writing to a string cannot fail.
            let _ = write!(self.0, " {name}='{}'", text(value));
        }
    }

    fn number(&mut self, name: &str, value: Option<impl Into<u64>>) {
        self.word(name, value.map(|value| value.into().to_string()).as_deref());
    }

    fn begun(self) -> String {
        self.0 + ">"
    }

    fn whole(self) -> String {
        self.0 + "/>"
    }
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;
    use crate::fake_controller::Controller;

    fn read(xml: &str) -> Result<Metadata, String> {
        Metadata::read(Document::parse(xml).unwrap().root_element())
    }

    fn in_element(inside: &str) -> Result<Metadata, String> {
        read(&format!("<w:instance xmlns:w='{NAMESPACE}'>{inside}</w:instance>"))
    }

    #[test]
    fn what_is_written_is_read() {
        let limit = NicLimit {
            bytes_per_second: Some(1),
            packets_per_second: Some(2),
            burst_ms: 3,
            minimum_bytes_per_second: Some(4),
        };
        let full = NicRequest {
            device: Some("net0".to_owned()),
            mtu: Some(9000),
            policy: NicPolicy {
                transmit: limit,
                receive: NicLimit { burst_ms: 7, ..NicLimit::default() },
                addresses: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
                vlan: Some(7),
            },
            reserved_mbps: 5000,
            apart: Some("a'<b>".to_owned()),
            together: Some("t".to_owned()),
            rails: Some(2),
            ..NicRequest::default()
        };
        let plain = NicRequest { device: Some("net1".to_owned()), ..NicRequest::default() };
        for metadata in [
            Metadata::default(),
            Metadata {
                instance: Some("vm1".to_owned()),
                instance_type: Some("small".to_owned()),
                vmm_listens: true,
                priority: Some(300),
                nics: vec![full, plain],
                mchannel: None,
            },
            Metadata {
                mchannel: Some(MchannelSpec {
                    weight: 3,
                    tenant: "red".to_owned(),
                    path: vec!["port1".to_owned(), "pool".to_owned()],
                }),
                ..Metadata::default()
            },
        ] {
            let mut xml = Xml::default();
            metadata.write(&mut xml);
            let document = Document::parse(&xml.text).unwrap();
            let element = document.root_element().first_element_child().unwrap();
            assert_eq!(Metadata::read(element), Ok(metadata), "{}", xml.text);
        }
    }

    #[test]
    fn a_priority_is_written_unless_it_is_the_usual_one() {
        let of = |priority: u16, instance_type: Option<&str>| {
            let instance = serde_json::json!({
                "name": "vm1", "id": 1, "host": "h1", "ready": true, "nics": [], "disks": [],
                "priority": priority, "instance_type": instance_type,
            });
            Metadata::of(&serde_json::from_value(instance).unwrap(), None).priority
        };
        assert_eq!((of(100, None), of(300, None)), (None, Some(300)));
        assert_eq!(of(100, Some("gold")), Some(100), "that of the type is another one");
        let error = read(&format!("<w:instance xmlns:w='{NAMESPACE}' priority='much'/>")).unwrap_err();
        assert!(error.contains("priority='much'"), "{error}");
    }

    #[test]
    fn a_share_of_the_fabric_is_what_the_controller_says() {
        let instance =
            serde_json::json!({"name": "vm1", "id": 1, "host": "h1", "ready": true, "nics": [], "disks": []});
        let instance: Instance = serde_json::from_value(instance).unwrap();
        let ask = |status, said: String| {
            let controller = Controller::start(move |request| {
                assert_eq!(request, "GET /v1/mchannels/vm1");
                (status, said.clone())
            });
            Metadata::ask(&controller.client(), &instance)
        };
        let shared = serde_json::json!({
            "instance": "vm1", "host": "h1", "weight": 3, "tenant": "red", "path": ["port1", "pool"], "rate": 0, "demand": 0,
            "run_percent": 100, "bytes": 0, "messages": 0, "held_ms": 0,
        });
        let expected =
            in_element("<w:mchannel weight='3' tenant='red' path='port1, pool'/>").unwrap().mchannel;
        assert_eq!(ask(200, shared.to_string()).unwrap().mchannel, expected);
        let problem =
            |status| serde_json::json!({"type": "x", "title": "", "status": status, "detail": "it is x"});
        assert_eq!(ask(404, problem(404).to_string()).unwrap().mchannel, None);
        assert!(ask(403, problem(403).to_string()).unwrap_err().to_string().contains("it is x"));
        let plain = in_element("<w:mchannel path='pool'/>").unwrap().mchannel.unwrap();
        assert_eq!((plain.weight, plain.tenant.as_str()), (1, DEFAULT_TENANT));
    }

    #[test]
    fn what_would_never_take_effect_is_refused() {
        for (inside, said) in [
            ("<w:nic device='net0' mtu='70000'/>", "mtu='70000'"),
            ("<w:nic device='net0' speed='9'/>", "no attribute speed"),
            ("<w:nic/>", "needs a device"),
            ("<nic device='net0'/>", "write <wadi:nic>"),
            ("<w:disk/>", "no element <wadi:disk>"),
            ("<w:mchannel/>", "needs a path"),
            ("<w:mchannel weight='0' path='pool'/>", "weight='0' of <wadi:mchannel> is not from 1 to 1000"),
            ("<w:mchannel weight='1001' path='pool'/>", "is not from 1 to 1000"),
            ("<w:mchannel weight='much' path='pool'/>", "weight='much' of <wadi:mchannel> is no number"),
            ("<w:mchannel path=''/>", "must name elements"),
            ("<w:mchannel path='port1,,pool'/>", "must name elements"),
            ("<w:mchannel path='pool, pool'/>", "each once"),
            ("<w:mchannel tenant='' path='pool'/>", "is nobody"),
            ("<w:mchannel wait='3' path='pool'/>", "no attribute wait"),
            ("<w:mchannel path='pool'><w:nic device='net0'/></w:mchannel>", "take <wadi:nic> out"),
            ("<w:mchannel path='a'/><w:mchannel path='b'/>", "a second <wadi:mchannel>"),
            ("<w:nic device='net0'><w:address>here</w:address></w:nic>", "\"here\" is no IPv4"),
            ("<w:nic device='net0'><w:limit/></w:nic>", "no element <wadi:limit>"),
            ("<w:nic device='net0'><w:receive bytes-per-second='-1'/></w:nic>", "bytes-per-second='-1'"),
        ] {
            let error = in_element(inside).unwrap_err();
            assert!(error.contains(said), "{inside}: {error}");
        }
        let error = read(&format!("<w:instance xmlns:w='{NAMESPACE}' vmm-listens='1'/>")).unwrap_err();
        assert!(error.contains("neither yes nor no"), "{error}");
    }
}

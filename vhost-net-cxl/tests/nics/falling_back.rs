//! What the log says where zero-copy is wanted and not to be had.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use vhost_net_cxl::nic::Nic;
use vhost_net_cxl::nic::af_xdp::AfXdpNic;

use super::{Stage, Wire, config, frame, in_namespace, one, veth};

/// Keeps warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().expect("unpoisoned").push(text.0);
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// All fields of an event.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).expect("a string");
    }
}

#[test]
fn who_wants_zero_copy_and_does_not_get_it_is_told() {
    in_namespace(|| {
        veth();
        let warnings = Warnings::default();
        let mut stage = Stage::new();
        let text = "name='nic0'\ndriver='af-xdp'\ninterface='ours'\nzero-copy=true";
        let mut nic = AfXdpNic::open(&config(text), &stage.pool).expect("opened");
        tracing::subscriber::with_default(warnings.clone(), || {
            super::af_xdp::start(&mut nic, &mut stage);
        });
        let told = warnings.0.lock().expect("unpoisoned").clone();
        let [warning] = &told[..] else { panic!("{told:?}") };
        for part in ["zero-copy is not to be had", "frames are copied", "nic0", "ours", "not supported"] {
            assert!(warning.contains(part), "{warning}");
        }
        // By copies it works.
        let wire = Wire::open("peer");
        assert_eq!(nic.transmit(&one(stage.packet([0; 12], &frame(100, 3)))).expect("sent"), 1);
        nic.flush().expect("flushed");
        assert_eq!(wire.receive(), frame(100, 3));
    });
}

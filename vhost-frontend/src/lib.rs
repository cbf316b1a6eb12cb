//! What both engines' frontends share: vhost-user connections, vrings, buffer areas.

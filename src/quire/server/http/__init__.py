"""HTTP below the routes: connections, middleware, bodies, streams, errors on the wire."""

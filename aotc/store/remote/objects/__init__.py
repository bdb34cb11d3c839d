"""A store on object storage, on a web server or in a folder, as a remote."""

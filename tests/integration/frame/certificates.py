"""Certificates made with the openssl program."""

import os
import subprocess


def _openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    def __init__(self, directory, name="authority"):
        os.makedirs(directory, exist_ok=True)
        self.directory = directory
        self.key = os.path.join(directory, f"{name}.key")
        self.certificate = os.path.join(directory, f"{name}.pem")
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                 "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.certificate)

    def issue(self, directory, san, expired=False):
        """Writes tls.key, tls.crt and ca.crt for this SAN into a new directory; returns it."""
        os.makedirs(directory)
        key, request, certificate = (os.path.join(directory, name) for name in ("tls.key", "tls.csr", "tls.crt"))
        extensions = os.path.join(directory, "extensions")
        with open(extensions, "w") as file:
            file.write(f"subjectAltName={san}\n")
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=moerl",
                 "-keyout", key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.key, "-CAcreateserial",
                 "-days", "-1" if expired else "1", "-extfile", extensions, "-out", certificate)
        with open(self.certificate) as source, open(os.path.join(directory, "ca.crt"), "w") as target:
            target.write(source.read())
        return directory


def read(directory, name):
    with open(os.path.join(directory, name), "rb") as file:
        return file.read()

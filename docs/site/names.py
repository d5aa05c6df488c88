"""A post-transform: code in a text that is a public name, `fpipe.simulate` or `split(8)`, links to its reference; a
name of torch or of Python's library to their documentation, where an inventory has it."""

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

from docs.site import reference

NOT_IN = (nodes.title, nodes.reference, addnodes.pending_xref, addnodes.desc_signature)


class LinkNames(SphinxPostTransform):
    """Wrap such code in a reference, before Sphinx resolves these."""

    default_priority = 5

    def run(self, **options: object) -> None:
        """Of one page."""
        for code in [*self.document.findall(nodes.literal)]:
            full = reference.target(code.astext()) or reference.elsewhere(code.astext())
            if full is None or any(isinstance(above, NOT_IN) for above in _above(code)):
                continue
            link = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=full, refdoc=self.env.docname)
            link["refexplicit"] = True
            code.replace_self(link)
            link += code


def _above(node: nodes.Node) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    while node.parent is not None:
        found.append(node := node.parent)
    return found

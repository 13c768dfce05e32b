import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, torch.tensor(labels), random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    train_data = TensorDataset(train_images, train_labels)
    test_data = TensorDataset(test_images, test_labels)
    return train_data, test_data


def make_network():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = []
    for images, labels in loader:
        hits.append(model(images.to(device)).argmax(1) == labels.to(device))
    return torch.cat(hits).float().mean().item()


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_data, test_data = load_data()
    batch_size = 64
    train_loader = DataLoader(train_data, batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=256)
    network = make_network()
    model = network.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(8):
        model.train()
        for images, labels in train_loader:
            outputs = model(images.to(device))
            loss = nn.functional.cross_entropy(outputs, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.4f}")
        torch.save(network.state_dict(), "digits.pt")
    return accuracy


if __name__ == "__main__":
    print(f"accuracy {main():.4f}")
